"""Checkpoints of the actor in Megatron's torch_dist format.

``save`` writes ``DIR/iter_NNNNNNN.tmp`` and renames it when every rank is done, then points
``DIR/latest_checkpointed_iteration.txt`` at it: a crash leaves the previous checkpoint whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from r3train.trainer.megatron.actor import MegatronActor

LATEST = "latest_checkpointed_iteration.txt"
_STATE = "trainer_state.json"

# reshards over TP, PP and DP; megatron-core's default type fails on save without Transformer Engine
_METADATA = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}


def _sharded_state(actor: MegatronActor, *, is_loading: bool) -> dict[str, Any]:
    chunks = actor.model.unwrapped
    state: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        state[_model_key(i, len(chunks))] = chunk.sharded_state_dict(metadata=_METADATA)
    state["optimizer"] = actor.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=_METADATA
    )
    state["scheduler"] = actor.scheduler.state_dict()
    return state


def _model_key(i: int, count: int) -> str:
    return "model" if count == 1 else f"model{i}"


def save_checkpoint(actor: MegatronActor, directory: Path, num_rollouts: int) -> Path:
    """Save model, optimizer and scheduler after ``num_rollouts`` rollouts; a collective."""
    final = directory / f"iter_{num_rollouts:07d}"
    temporary = final.with_suffix(".tmp")
    if dist.get_rank() == 0:
        _remove(temporary)
        temporary.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(actor, is_loading=False), str(temporary))
    dist.barrier()
    if dist.get_rank() == 0:
        (temporary / _STATE).write_text(json.dumps({"num_rollouts": num_rollouts}) + "\n")
        _remove(final)
        temporary.rename(final)
        pointer = directory / f"{LATEST}.tmp"
        pointer.write_text(f"{num_rollouts}\n")
        os.replace(pointer, directory / LATEST)
    dist.barrier()
    return final


def _remove(path: Path) -> None:
    """Delete a directory that an interrupted or repeated save left behind."""
    if path.is_dir():
        for child in sorted(path.rglob("*"), reverse=True):
            child.rmdir() if child.is_dir() else child.unlink()
        path.rmdir()


def latest_checkpoint(directory: Path) -> Path:
    """The checkpoint that the pointer names; raises ValueError where there is none."""
    pointer = directory / LATEST
    if not pointer.is_file():
        raise ValueError(f"{directory}: no checkpoint here ({LATEST} is missing)")
    text = pointer.read_text().strip()
    path = directory / f"iter_{int(text):07d}" if text.isdigit() else None
    if path is None or not (path / _STATE).is_file():
        raise ValueError(f"{pointer} says {text!r}, but there is no whole checkpoint of that name")
    return path


def num_rollouts_of(directory: Path) -> int:
    """Rollouts that the latest checkpoint was trained on."""
    state = json.loads((latest_checkpoint(directory) / _STATE).read_text())
    return int(state["num_rollouts"])


def load_checkpoint(actor: MegatronActor, directory: Path) -> None:
    """Load model, optimizer and scheduler from the latest checkpoint; a collective."""
    path = latest_checkpoint(directory)
    state = dist_checkpointing.load(_sharded_state(actor, is_loading=True), str(path))
    chunks = actor.model.unwrapped
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[_model_key(i, len(chunks))], strict=True)
    actor.optimizer.load_state_dict(state["optimizer"])
    actor.scheduler.load_state_dict(state["scheduler"])

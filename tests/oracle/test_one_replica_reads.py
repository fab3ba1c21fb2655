"""A checkpoint is read once, however many ranks hold the same part of it, and all of them hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks

pytestmark = pytest.mark.ranks
MODEL = VARIANTS["glm"]
SPLITS = {
    "data": {},
    "experts": {"expert_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


def loaded(checkpoint: Path) -> dict[str, Any]:
    """By split: names of tensors that this rank read, and what it holds that differs."""
    from r3train.trainer.megatron import hf_weights

    read, load = [], hf_weights.CheckpointTensors.read

    def noted(self: hf_weights.CheckpointTensors, name: str, expert: int | None = None) -> Any:
        read.append(name)
        return load(self, name, expert)

    hf_weights.CheckpointTensors.read = noted
    found = {}
    for split, fields in SPLITS.items():
        read.clear()
        with actor_of(configuration(checkpoint, **fields)) as actor:
            names = list(read)
            model = actor.model
            unlike = hf_weights.parameters_unlike(model.weights, model.chunks, checkpoint)
        found[split] = names, unlike
    return found


def test_one_replica_reads_and_the_others_receive(tmp_path):
    checkpoint = write_checkpoint(MODEL, tmp_path / "model")
    first, second = in_ranks(2, tmp_path / "ranks", loaded, checkpoint)
    for split in SPLITS:
        assert first[split][1] == second[split][1] == [], split
        names = [name for rank in (first, second) for name in rank[split][0]]
        assert len(names) == len(set(names)) and any("embed_tokens" in n for n in names), split
    assert not second["data"][0] and not second["context"][0]
    assert second["experts"][0] and all(".experts." in name for name in second["experts"][0])

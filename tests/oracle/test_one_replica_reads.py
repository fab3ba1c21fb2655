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
    """By split: names of tensors that this rank read, what it holds that differs, and how often its state was made."""
    from mbridge.core.safetensor_io import SafeTensorIO
    from megatron.core.models.gpt import GPTModel

    from r3train.trainer.megatron import hf_bridge

    read, load = [], SafeTensorIO.load_some_hf_weight
    states, state_dict = [], GPTModel.state_dict

    def noted(self: SafeTensorIO, names: list[str]) -> Any:
        read.extend(names)
        return load(self, names)

    def counted(self: GPTModel, *args: Any, **named: Any) -> Any:
        states.append(1)
        return state_dict(self, *args, **named)

    SafeTensorIO.load_some_hf_weight, GPTModel.state_dict = noted, counted
    found = {}
    for split, fields in SPLITS.items():
        read.clear(), states.clear()
        with actor_of(configuration(checkpoint, **fields)) as actor:
            names, times = list(read), len(states)
            model = actor.model
            unlike = hf_bridge.parameters_unlike(model.bridge, model.chunks, checkpoint)
        found[split] = names, unlike, times
    return found


def test_one_replica_reads_and_the_others_receive(tmp_path):
    checkpoint = write_checkpoint(MODEL, tmp_path / "model")
    first, second = in_ranks(2, tmp_path / "ranks", loaded, checkpoint)
    for split in SPLITS:
        assert first[split][1] == second[split][1] == [], split
        assert (
            max(first[split][2], second[split][2]) < 8
        ), "of a chunk's state, not of each parameter"
        names = [name for rank in (first, second) for name in rank[split][0]]
        assert len(names) == len(set(names)) and any("embed_tokens" in n for n in names), split
    assert not second["data"][0] and not second["context"][0]
    assert second["experts"][0] and all(".experts." in name for name in second["experts"][0])

"""A checkpoint's tensors, at the start, and those of a weight update, after each one."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.families.read_facts import read_hf_facts
from r3train.hf_checkpoint import check_tensors, trained_tensors, WeightIndex

GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def model(tiny, tmp_path):
    """A copy of the tiny checkpoint, and a function that writes it with other tensors."""
    directory = tmp_path / "model"
    shutil.copytree(tiny / "model", directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)

    def write(change):
        changed = dict(tensors)
        change(changed)
        save_file(changed, file, {"format": "pt"})
        return read_hf_facts(directory)

    return write


CHANGES = {
    "unknown": (
        lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)}),
        "model.layers.0.extra.weight: would be neither loaded nor exported",
    ),
    "missing": (lambda t: t.pop(GATE), f"{GATE}: missing, and qwen3_moe with this config.json"),
    "shape": (
        lambda t: t.update({GATE: torch.zeros(3, 5)}),
        f"{GATE} has the shape [3, 5], expected",
    ),
    "dtype": (
        lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}),
        f"{GATE} is float8_e4m3fn, expected one of",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_tensor_that_the_actor_would_not_train_as_it_is_is_refused_by_name(kind, model):
    change, said = CHANGES[kind]
    assert GATE in check_tensors(model(lambda tensors: None))
    with pytest.raises(ValueError, match=re.escape(said)):
        check_tensors(model(change))


@pytest.mark.parametrize("off", [-1, 1, 4096])
def test_an_update_of_more_or_fewer_bytes_than_its_tensors_is_refused(off, tiny):
    hf = read_hf_facts(tiny / "model")
    sent = trained_tensors(hf)
    num_bytes = sum(kind.num_bytes for kind in sent.values())
    index = WeightIndex(hf, "float32")
    index.require(sent, num_bytes, version=3)
    with pytest.raises(ValueError, match=f"update 3 .*: {num_bytes + off} bytes were sent"):
        index.require(sent, num_bytes + off, version=3)

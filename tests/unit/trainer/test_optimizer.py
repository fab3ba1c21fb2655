"""Megatron clips gradients by Transformer Engine's kernels, also with a version that lacks one of them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from r3train.cpu.device import prepare_device

prepare_device()

from megatron.core.optimizer import clip_grads  # noqa: E402

from r3train.trainer.megatron.optimizer import clip_by_kernels  # noqa: E402

KERNELS = ("multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
USED = ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine 2.12 as far as clipping asks for it."""
    engine = ModuleType("transformer_engine.pytorch")
    engine.optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    vars(engine.optimizers).update({name: object() for name in KERNELS})
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    for name in USED:
        monkeypatch.setattr(clip_grads, name, getattr(clip_grads, name))
    return engine.optimizers


def used() -> list[object]:
    return [getattr(clip_grads, name) for name in USED]


def test_kernels_that_megatron_left_for_one_that_is_lacking_are_used(engine):
    before = used()
    clip_by_kernels()
    assert used() == [getattr(engine, name) for name in KERNELS]
    assert not set(map(id, used())) & set(map(id, before))


def test_those_of_a_version_that_has_all_stay(engine, monkeypatch):
    before = used()
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", print)
    clip_by_kernels()
    assert used() == before


def test_a_megatron_whose_norm_takes_something_else_is_refused(engine, monkeypatch):
    monkeypatch.setattr(clip_grads, "l2_norm_impl", lambda tensors: tensors)
    with pytest.raises(RuntimeError, match=r"l2_norm_impl is \(tensors\), and r3train replaces"):
        clip_by_kernels()

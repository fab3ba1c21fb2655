"""Optimizer state on the host: the same steps and checkpoints as without, where memory is said to be CUDA's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.config.checkpoint import CheckpointSection
from r3train.config.hf_facts import read_hf_facts
from r3train.verify.model_zoo import write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of
from tests.oracle.test_optimizer_resume import MODEL

pytestmark = pytest.mark.ranks
OFFLOAD = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
    "pin_cpu_grads": False,
}
# source -> target of a resume
OPTIMIZERS: dict[str, dict[str, Any]] = {"plain": {}, "offload": OFFLOAD}
RESUMES = (("plain", "plain"), ("offload", "offload"), ("plain", "offload"), ("offload", "plain"))


@contextmanager
def on_cuda(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Say ``is_cuda`` of these tensors, and let memory of the host be pinned without CUDA."""
    there = {id(tensor) for tensor in tensors}
    of_class, pin = torch.Tensor.is_cuda, torch.Tensor.pin_memory
    torch.Tensor.is_cuda = property(lambda self: id(self) in there)
    torch.Tensor.pin_memory = lambda self: self
    try:
        yield
    finally:
        torch.Tensor.is_cuda, torch.Tensor.pin_memory = of_class, pin


def trained(model: Path, scratch: Path) -> dict[str, Any]:
    """Weights after two steps of each optimizer, and after a third one that resumed from another."""
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from r3train.trainer.megatron import actor as actors
    from r3train.trainer.megatron.checkpoint import Checkpointer

    build, found, hf = actors.build_optimizer, {}, read_hf_facts(model)
    split = HybridDeviceOptimizer._init_sub_optimizers
    optimizer_config.is_te_min_version = lambda version: True

    def build_on_cuda(config: Any, chunks: Any) -> Any:
        with on_cuda(p for chunk in chunks for p in chunk.parameters()):
            return build(config, chunks)

    def split_on_cuda(self: Any) -> None:
        with on_cuda(p for group in self.param_groups for p in group["params"]):
            split(self)

    HybridDeviceOptimizer._init_sub_optimizers = split_on_cuda

    def steps(actor: Any, config: Any, number: int) -> dict[str, torch.Tensor]:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12)]))
        for _ in range(number):
            actor.train_step(slices, actor.compute_log_probs(slices, None), None)
        return {name: tensor.clone() for name, tensor in actor.hf_weights()}

    actors.build_optimizer = build_on_cuda
    configs = {
        name: configuration(
            model, use_distributed_optimizer=True, bf16=True, optimizer_overrides=overrides
        )
        for name, overrides in OPTIMIZERS.items()
    }
    for name, config in configs.items():
        with actor_of(config) as actor:
            found[name] = steps(actor, config, 2)
            inner = actor.optimizer.chained_optimizers[0].optimizer
            found[f"{name} on host"] = len(getattr(inner, "cpu_copys_map_gpu_param", ()))
            Checkpointer(actor, CheckpointSection(save=scratch / name)).save(2, {})
    for source, target in RESUMES:
        with actor_of(configs[target], scratch / source / "iter_0000002") as actor:
            found[f"{source} -> {target}"] = steps(actor, configs[target], 1)
    return found


def test_steps_and_resumes_are_the_same_with_the_state_on_the_host(tmp_path):
    model = write_checkpoint(MODEL, tmp_path / "model")
    (found,) = in_ranks(1, tmp_path / "ranks", trained, model, tmp_path)
    assert found["offload on host"] > 0 and found["plain on host"] == 0
    for name, expected in {
        "offload": "plain",
        "offload -> plain": "plain -> plain",
        "plain -> offload": "plain -> plain",
        "offload -> offload": "plain -> plain",
    }.items():
        for tensor, weight in found[expected].items():
            assert torch.equal(found[name][tensor], weight), (name, tensor)


def test_weights_that_leave_cuda_go_to_pinned_memory(monkeypatch):
    """Those of a reference, of the actor meanwhile, and of a rank in turns with its servers."""
    from r3train.trainer.megatron.offload import on_host

    weight, asked, make = torch.arange(6.0), [], torch.empty_like

    def empty_like(tensor: torch.Tensor, *, pin_memory: bool, **how: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return make(tensor, **how)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    with on_cuda([weight]):
        away = on_host(weight)
    here = on_host(weight)
    assert asked == [True, False]
    for copy in (away, here):
        assert torch.equal(copy, weight) and copy.data_ptr() != weight.data_ptr()

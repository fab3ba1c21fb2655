"""Optimizers of less memory: steps and checkpoints of those without, where memory is said to be CUDA's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.config.checkpoint_settings import CheckpointSection
from r3train.families.read_facts import read_hf_facts
from r3train.verify.model_zoo import write_checkpoint
from tests.oracle import actors
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of
from tests.oracle.test_offload import both
from tests.oracle.test_optimizer_resume import MODEL

pytestmark = pytest.mark.ranks
STAND_INS = Path(__file__).parent / "stand_ins"
OFFLOAD = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
    "pin_cpu_grads": False,
}
SHARDED: dict[str, Any] = dict(use_distributed_optimizer=True, bf16=True)
# as the recipes: Megatron makes two optimizers, and shards that of dense parameters over the ranks
OVERLAPS = SHARDED | dict(
    expert_model_parallel_size=2, overlap_grad_reduce=True, overlap_param_gather=True
)
# those of Transformer Engine's Adam: half of each float32 weight, and moments in bfloat16 too
HALVES: dict[str, Any] = {"use_precision_aware_optimizer": True}
WHOLE = HALVES | {"store_param_remainders": False}
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHORT = HALVES | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


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


def build_as_on_cuda() -> None:
    """Let Megatron take this process's parameters for CUDA's while it builds optimizers."""
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from r3train.trainer.megatron import actor as actors, fused_adam

    fused_adam.AT_ONCE = 1 << 14  # several parts, of several parameters
    build, split = actors.build_optimizer, HybridDeviceOptimizer._init_sub_optimizers
    optimizer_config.is_te_min_version = lambda version: True

    def build_on_cuda(config: Any, chunks: Any) -> Any:
        with on_cuda(p for chunk in chunks for p in chunk.parameters()):
            return build(config, chunks)

    def split_on_cuda(self: Any) -> None:
        with on_cuda(p for group in self.param_groups for p in group["params"]):
            split(self)

    HybridDeviceOptimizer._init_sub_optimizers = split_on_cuda
    actors.build_optimizer = build_on_cuda


def resumes(optimizers: dict[str, Any]) -> list[tuple[str, str]]:
    """Each to itself, and from the first to each and back."""
    first = next(iter(optimizers))
    return [(a, b) for a, b in product(optimizers, optimizers) if a == b or first in (a, b)]


def trained(
    model: Path, scratch: Path, fields: dict[str, Any], optimizers: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Weights after two steps of each optimizer, and after a third one that resumed from each."""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    build_as_on_cuda()
    found, hf = {}, read_hf_facts(model)

    def steps(actor: Any, config: Any, number: int) -> dict[str, torch.Tensor]:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12)]))
        for _ in range(number):
            actor.train_step(slices, actor.compute_log_probs(slices, None), None)
        return {name: tensor.clone() for name, tensor in actor.hf_weights()}

    configs = {
        name: configuration(model, **fields, optimizer_overrides=overrides)
        for name, overrides in optimizers.items()
    }
    for name, config in configs.items():
        with actor_of(config) as actor:
            unmoved = Checkpointer(actor, CheckpointSection(save=scratch / f"{name} at 0"))
            unmoved.save(0, {})
            found[name] = steps(actor, config, 2)
            inner = actor.optimizer.chained_optimizers[0].optimizer
            found[f"{name} on host"] = len(getattr(inner, "cpu_copys_map_gpu_param", ()))
            Checkpointer(actor, CheckpointSection(save=scratch / name)).save(2, {})
            found[f"{name} + 1"] = steps(actor, config, 1)
    for source, target in resumes(optimizers):
        with actor_of(configs[target], scratch / source / "iter_0000002") as actor:
            found[f"{source} -> {target}"] = steps(actor, configs[target], 1)
    for name, config in configs.items():
        with actor_of(config, scratch / f"{name} at 0" / "iter_0000000") as actor:
            found[f"{name} from 0"] = steps(actor, config, 2)
    return found


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The part of all weights that are not the same to the bit."""
    assert one.keys() == other.keys()
    differing = sum(int((one[name] != other[name]).sum()) for name in one)
    return differing / sum(tensor.numel() for tensor in one.values())


@pytest.mark.parametrize("ranks, fields", [(1, SHARDED), (2, OVERLAPS)])
def test_steps_and_resumes_are_the_same_with_the_state_on_the_host(tmp_path, ranks, fields):
    model = write_checkpoint(MODEL, tmp_path / "model")
    overlapped = OFFLOAD | {"overlap_cpu_optimizer_d2h_h2d": True}
    optimizers = {"plain": {}, "offload": OFFLOAD, "overlapped": overlapped}
    given = trained, model, tmp_path, fields, optimizers
    found, *_ = in_ranks(ranks, tmp_path / "ranks", *given)
    assert found["plain on host"] == 0 < found["offload on host"] == found["overlapped on host"]
    for name in ("plain from 0", "offload", "offload from 0", "overlapped", "overlapped from 0"):
        assert unlike(found[name], found["plain"]) == 0, name
    for name in ("offload + 1", "overlapped + 1", *(f"{a} -> {b}" for a, b in resumes(optimizers))):
        assert unlike(found[name], found["plain + 1"]) == 0, name


@pytest.fixture
def transformer_engine(monkeypatch):
    """Ranks that find its stand-in."""
    monkeypatch.setattr(actors, "SEARCHED", [str(STAND_INS)])


def test_an_adam_of_less_memory_steps_and_resumes_as_one_without(tmp_path, transformer_engine):
    """Weights are the same but for those in the middle of two; with bfloat16 moments most of them are."""
    model = write_checkpoint(MODEL, tmp_path / "model")
    bounds = {"plain": 0.0, "whole": 0.0, "halves": 1e-3, "short": 0.01}
    given = {"plain": {}, "whole": WHOLE, "halves": HALVES, "short": SHORT}
    found, _ = in_ranks(2, tmp_path / "ranks", trained, model, tmp_path, OVERLAPS, given)
    for name, bound in bounds.items():
        assert unlike(found[name], found["plain"]) <= bound, name
        assert unlike(found[f"{name} from 0"], found[name]) == 0, name
        assert unlike(found[f"{name} + 1"], found[name]) > 0.2, name
    for source, target in resumes(given):
        bound = 0.0 if source == target else max(bounds[source], bounds[target])
        assert unlike(found[f"{source} -> {target}"], found[f"{source} + 1"]) <= bound


@pytest.mark.parametrize(
    "fields", [{}, dict(bf16=True), dict(use_distributed_optimizer=True)], ids=str
)
def test_transformer_engines_adam_resumes_without_shards_and_in_float32(
    tmp_path, fields, transformer_engine
):
    model = write_checkpoint(MODEL, tmp_path / "model")
    (found,) = in_ranks(1, tmp_path / "ranks", trained, model, tmp_path, fields, {"plain": {}})
    assert unlike(found["plain from 0"], found["plain"]) == 0
    assert unlike(found["plain -> plain"], found["plain + 1"]) == 0
    assert unlike(found["plain + 1"], found["plain"]) > 0.2


def stepped(model: Path, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of each: log-probs before the step, its metrics, and whole weights before and after."""
    build_as_on_cuda()
    found, hf = {}, read_hf_facts(model)
    for name, fields in settings.items():
        config = configuration(model, **fields)
        with actor_of(config) as actor:
            slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12)]))
            before = {n: t.clone() for n, t in actor.hf_weights()}
            log_probs = actor.compute_log_probs(slices, None)
            metrics = actor.train_step(slices, log_probs, None)
            found[name] = {
                "log_probs": log_probs,
                "norm": metrics["grad_norm"],
                "before": before,
                "after": {n: t.clone() for n, t in actor.hf_weights()},
                "layers": sorted({type(m).__name__ for m in actor.model.chunks[0].modules()}),
                "adam": type(actor.optimizer.chained_optimizers[0].optimizer).__module__,
            }
    return found


def test_a_recipes_step_on_transformer_engines_layers_is_that_of_the_local_ones(
    tmp_path, transformer_engine
):
    """In bfloat16, over tensor and expert ranks or stages: forward, backward, FusedAdam's step, export."""
    model = write_checkpoint(MODEL, tmp_path / "model")
    topologies = {
        "tp2ep2": dict(tensor_model_parallel_size=2, sequence_parallel=True),
        "pp2": dict(pipeline_model_parallel_size=2, expert_model_parallel_size=1),
    }
    settings = {
        f"{name} {layers}": OVERLAPS
        | FULL
        | fields
        | dict(attention_backend=layers, optimizer_overrides=SHORT)
        for name, fields in topologies.items()
        for layers in ("local", "te")
    }
    settings["tp2ep2 faster"] = settings["tp2ep2 te"] | dict(lr=1.1e-3)
    found, _ = in_ranks(2, tmp_path / "ranks", stepped, model, settings)
    for name in topologies:
        te, local = found[f"{name} te"], found[f"{name} local"]
        assert "TEDotProductAttention" in te["layers"] and te["adam"] == "transformer_engine"
        assert "TEDotProductAttention" not in local["layers"]
        assert te["log_probs"].keys() == local["log_probs"].keys()
        for n, log_probs in te["log_probs"].items():
            assert (log_probs - local["log_probs"][n]).abs().max() <= 1e-6
        assert te["norm"] == pytest.approx(local["norm"], rel=1e-3)
        assert unlike(te["before"], local["before"]) == 0 < 0.5 < unlike(te["after"], te["before"])
        assert unlike(te["after"], local["after"]) < 5e-3
    # a step of another size is seen
    assert unlike(found["tp2ep2 te"]["after"], found["tp2ep2 faster"]["after"]) > 0.1


def away(model: Path, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    build_as_on_cuda()
    return both(model, settings)


def test_an_adam_of_less_memory_leaves_the_device_and_comes_back(tmp_path, transformer_engine):
    model = write_checkpoint(MODEL, tmp_path / "model")
    settings = {"short": SHARDED | dict(optimizer_overrides=SHORT)}
    (found,) = in_ranks(1, tmp_path / "ranks", away, model, settings)
    assert found["short"]["unlike"] == 0 and found["short"]["moved"] > 10
    for before, weights, nothing, after in found["short"]["held"][1:]:
        assert nothing == 0 < weights < before == after


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

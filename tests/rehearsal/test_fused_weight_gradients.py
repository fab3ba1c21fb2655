"""Transformer Engine's layers add their weights' gradients themselves, without Apex: the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from tests.oracle import actors
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

pytestmark = pytest.mark.ranks
STAND_INS = Path(__file__).parent / "stand_ins"
FUSED = {"gradient_accumulation_fusion": True, "disable_parameter_transpose_cache": True}
FIELDS: dict[str, Any] = dict(
    attention_backend="te",
    use_rollout_routing_replay=True,
    enable_r3_correctness_check=True,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    max_tokens_per_gpu=24,  # several microbatches, whose gradients add up
)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "ep2 recomputed": FULL | dict(expert_model_parallel_size=2),
    "pp2": dict(pipeline_model_parallel_size=2),
    "no routers": dict(freeze_moe_router=True),
    "no experts": dict(freeze_params=(r"\.mlp\.experts\.",)),
}


def stepped(model: Path, names: list[str]) -> dict[str, Any]:
    """Gradients, the norm and the weights after a step, and which modules add their gradients themselves."""
    found, hf = {}, read_hf_facts(model)
    for name in names:
        for kind, overrides in (("apart", {}), ("fused", FUSED)):
            config = configuration(
                model,
                rollout_batch_size=4,
                **FIELDS,
                **SETTINGS[name],
                transformer_overrides=overrides,
            )
            with actor_of(config) as actor:
                lengths = [(3, 9), (5, 14), (2, 6), (4, 11)]
                slices, _ = slices_of(actor, config, hf, samples(hf, lengths))
                assert len(slices) > 1
                old = actor.compute_log_probs(slices, None)
                for _ in range(2):  # the second begins with gradients that are zero again
                    metrics = actor.train_step(slices, old, None)
                chunks = actor.model.unwrapped
                modules = [m for chunk in chunks for m in chunk.modules()]
                found[name, kind] = {
                    "norm": torch.tensor(metrics["grad_norm"]),
                    "gradients": {
                        n: p.main_grad.clone()
                        for chunk in chunks
                        for n, p in chunk.named_parameters()
                        if p.requires_grad
                    },
                    "weights": {n: t.clone() for n, t in actor.hf_weights()},
                    "themselves": sum(
                        getattr(m, "fuse_wgrad_accumulation", False) for m in modules
                    ),
                    "by Megatron": sum(
                        getattr(m, "gradient_accumulation_fusion", False) for m in modules
                    ),
                    "said": sum(
                        p.grad_added_to_main_grad
                        for chunk in chunks
                        for p in chunk.parameters()
                        if p.requires_grad
                    ),
                }
    return found


@pytest.mark.parametrize(
    "ranks, names", [(2, ["tp2", "ep2 recomputed", "pp2"]), (1, ["no routers", "no experts"])]
)
def test_gradients_are_the_same_to_the_bit(ranks, names, tmp_path, monkeypatch):
    build(tmp_path / "tiny", TinyOptions(num_layers=2))
    monkeypatch.setattr(actors, "SEARCHED", [str(STAND_INS)])
    given = stepped, tmp_path / "tiny/model", names
    for found in in_ranks(ranks, tmp_path / "ranks", *given):
        for name in names:
            apart, fused = found[name, "apart"], found[name, "fused"]
            assert apart["themselves"] == apart["said"] == 0 < fused["themselves"]
            assert fused["by Megatron"] == 0 < fused["said"]
            for kind in ("gradients", "weights"):
                assert apart[kind].keys() == fused[kind].keys()
                for n, tensor in apart[kind].items():
                    assert torch.equal(tensor, fused[kind][n]), (name, kind, n)
            assert torch.equal(apart["norm"], fused["norm"]) and fused["norm"] > 0

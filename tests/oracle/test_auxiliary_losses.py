"""Auxiliary losses through the actor, of a batch that is nearly all prompt, against float64.

936 rows of which 96 are trained.  The advantages are 0: the gradients are those of the auxiliary loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3train.families.read_facts import read_hf_facts
from r3train.verify.model_zoo import ModelVariant, write_checkpoint
from r3train.verify.oracle import SampleTrace, forward
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

MODEL = ModelVariant("small", num_layers=2, num_experts=4)
LENGTHS = [(138, 12), (72, 12), (130, 12), (80, 12), (138, 12), (72, 12), (138, 12), (72, 12)]
COEFF = 0.5
LOSSES = {
    "aux": {"moe_aux_loss_coeff": COEFF},
    "sequence": {
        "moe_aux_loss_coeff": COEFF,
        "transformer_overrides": {"moe_router_load_balancing_type": "seq_aux_loss"},
    },
    "z": {"transformer_overrides": {"moe_z_loss_coeff": COEFF}},
}
SEVERAL = dict(max_tokens_per_gpu=240)
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
RUNS = {
    1: {
        "one microbatch": {},
        "several": SEVERAL,
        "several, recomputed": SEVERAL | RECOMPUTED,
        "several, experts recomputed": SEVERAL
        | dict(recompute_granularity="selective", recompute_modules=("moe",)),
        "without replay": SEVERAL | dict(use_rollout_routing_replay=False),
    },
    2: {
        "dp2": SEVERAL,
        "dp2 ep2": SEVERAL | dict(expert_model_parallel_size=2),
        "cp2": SEVERAL | dict(context_parallel_size=2),
        "tp2": SEVERAL | dict(tensor_model_parallel_size=2, sequence_parallel=True),
        "pp2": SEVERAL | dict(pipeline_model_parallel_size=2),
    },
}


def train(model: Path, world_size: int) -> dict[str, Any]:
    """The gradients of each loss in every run, and the sample ids of its microbatches."""
    from r3train.trainer.megatron.export import export_hf_weights

    hf, out = read_hf_facts(model), {}
    batch = samples(hf, LENGTHS, advantage=0.0)
    assert sum(s.sample.num_tokens for s in batch) == 936
    assert sum(int(s.sample.loss_mask.sum()) for s in batch) == 96
    for name, fields in RUNS[world_size].items():
        for loss, setting in LOSSES.items():
            settings = dict(use_rollout_routing_replay=True) | fields | setting
            config = configuration(model, **settings)
            with actor_of(config) as actor:
                slices, ids = slices_of(actor, config, hf, batch)
                replay = "old_log_prob" if actor.replay else None
                actor.backward(slices, actor.compute_log_probs(slices, replay), None)
                gradients = export_hf_weights(
                    actor.model.weights, actor.model.chunks, lambda p: p.main_grad
                )
                whole = {n: t.clone() for n, t in gradients}
                out[f"{name}, {loss}"] = [whole, ids]
    return out


def expected(
    loss: str, weights: dict[str, torch.Tensor], microbatches: Sequence[Sequence[SampleTrace]]
) -> dict[str, torch.Tensor]:
    """Float64 gradients of the loss as it is documented; [microbatch][sample] traces."""
    total, rows = torch.zeros(()).double(), sum(n + m for n, m in LENGTHS)
    for traces in microbatches:
        parts = [[trace] for trace in traces] if loss == "sequence" else [traces]
        for part, layer in itertools.product(parts, range(MODEL.num_layers)):
            logits = torch.cat([trace.logits[layer] for trace in part])
            if loss == "z":
                total = total + COEFF * logits.logsumexp(-1).square().sum() / rows
                continue
            # arXiv 2101.03961 eq. 4-6, of the router's own choice
            probs, count = logits.softmax(-1), len(logits)
            chosen = probs.topk(MODEL.topk, dim=1).indices.flatten()
            load = torch.bincount(chosen, minlength=MODEL.num_experts) / (MODEL.topk * count)
            balance = MODEL.num_experts * (load * probs.mean(0)).sum()
            total = total + COEFF * balance * count / rows
    gradients = torch.autograd.grad(
        total, list(weights.values()), retain_graph=True, allow_unused=True
    )
    pairs = zip(weights, gradients, strict=True)
    return {n: torch.zeros_like(weights[n]) if g is None else g for n, g in pairs}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MODEL, tmp_path_factory.mktemp("small") / "model")


@pytest.mark.parametrize("world_size", RUNS)
def test_a_loss_weighs_what_was_configured_whatever_share_is_trained(world_size, model, tmp_path):
    found = in_ranks(world_size, tmp_path, train, model, world_size)[0]
    assert len(found) == len(LOSSES) * len(RUNS[world_size])
    hf = read_hf_facts(model)
    weights = {
        n: w.double().requires_grad_() for n, w in load_file(model / "model.safetensors").items()
    }
    traces: dict[bool, list[SampleTrace]] = {}
    for replayed in (True, False):
        traces[replayed] = []
        for s in samples(hf, LENGTHS):
            routes = np.full((s.sample.num_tokens, *hf.route_shape.row), -1)
            if replayed:
                routes[:-1] = s.sample.routed_experts
            traces[replayed].append(forward(weights, MODEL, s.sample.token_ids, routes)[1])
    for run, (gradients, ids) in found.items():
        own = traces["without replay" not in run]
        microbatches = [[own[i] for i in some] for rank in ids for some in rank]
        assert (len(microbatches) > 2) == ("one microbatch" not in run), ids
        reference = expected(run.split(", ")[-1], weights, microbatches)
        assert gradients.keys() == reference.keys()
        for name, want in reference.items():
            error = (gradients[name].double() - want).norm() / max(float(want.norm()), 1e-6)
            assert error < 1e-3, (run, name, float(error), float(want.norm()))


def of_three_samples(model: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """The gradients of three samples, each a microbatch of its own."""
    from r3train.trainer.megatron.export import export_hf_weights

    hf = read_hf_facts(model)
    settings = dict(rollout_batch_size=3, max_tokens_per_gpu=24, moe_aux_loss_coeff=COEFF)
    config = configuration(model, use_rollout_routing_replay=True, **settings | fields)
    batch = samples(hf, [(4, 10)] * 3, advantage=0.0)
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, batch)
        actor.backward(slices, actor.compute_log_probs(slices, "old_log_prob"), None)
        gradients = export_hf_weights(
            actor.model.weights, actor.model.chunks, lambda p: p.main_grad
        )
        return {n: t.clone() for n, t in gradients}


def test_a_rank_with_a_pack_of_padding_alone_adds_nothing(model, tmp_path):
    one, two = (in_ranks(n, tmp_path / f"{n}", of_three_samples, model)[0] for n in (1, 2))
    assert any(g.any() for g in one.values())
    for name, want in one.items():
        torch.testing.assert_close(two[name], want, rtol=1e-4, atol=1e-6, msg=name)


def in_packs_of_24_and_of_1024(model: Path, losses: str) -> list[dict[str, torch.Tensor]]:
    overrides = {"moe_router_load_balancing_type": losses}
    return [
        of_three_samples(model, max_tokens_per_gpu=tokens, transformer_overrides=overrides)
        for tokens in (24, 1024)
    ]


@pytest.mark.parametrize("losses, alike", [("seq_aux_loss", True), ("aux_loss", False)])
def test_the_loss_of_a_sequence_is_the_same_in_every_pack(losses, alike, model, tmp_path):
    alone, packed = in_ranks(1, tmp_path, in_packs_of_24_and_of_1024, model, losses)[0]
    routers = [n for n in alone if n.endswith("mlp.gate.weight")]
    assert len(routers) == MODEL.num_layers
    for name in routers:
        distance = (alone[name] - packed[name]).norm() / alone[name].norm()
        assert distance < 1e-5 if alike else distance > 0.05, (name, float(distance))

"""The KL reference of a family with expert biases: it routes by its own, and the actor by its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from r3train.families.read_facts import read_hf_facts
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.oracle import BIAS
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

pytestmark = pytest.mark.ranks


def run(actor_model: Path, reference_model: Path) -> dict[str, Any]:
    """Log-probs with the reference's weights, of it only and next to an actor; the actor's biases."""
    hf, out = read_hf_facts(actor_model), {}
    batch = samples(hf, [(5, 9), (4, 12)])
    settings = dict(
        transformer_overrides=VARIANTS["glm"].overrides, use_rollout_routing_replay=False
    )
    alone = configuration(reference_model, **settings)
    with actor_of(alone) as actor:
        slices, _ = slices_of(actor, alone, hf, batch)
        out["alone"] = actor.compute_log_probs(slices, "old_log_prob")
    config = configuration(actor_model, ref_load=reference_model, kl_loss_coef=0.1, **settings)
    with actor_of(config) as actor:
        out["loaded"] = {n: t.clone() for n, t in actor.hf_weights()}
        slices, _ = slices_of(actor, config, hf, batch)
        out["beside"] = actor.compute_log_probs(slices, "ref_log_prob")
        out["after"] = {n: t.clone() for n, t in actor.hf_weights()}
    return out


def test_reference_and_actor_keep_their_own_expert_biases(tmp_path):
    models = [
        write_checkpoint(VARIANTS["glm"], tmp_path / f"model{seed}", seed=seed) for seed in (0, 1)
    ]
    out = in_ranks(1, tmp_path / "ranks", run, *models)[0]
    saved = load_file(models[0] / "model.safetensors")
    assert sum(name.endswith(BIAS) for name in saved) == 3
    for name, tensor in saved.items():
        assert torch.equal(out["loaded"][name], tensor), name
        assert torch.equal(out["after"][name], tensor), name
    for microbatch, log_probs in out["alone"].items():
        assert torch.equal(log_probs, out["beside"][microbatch])

"""Optimizer steps of a real actor: the learning rate they report, and a skipped one that moves nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.types import RankSlice
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

pytestmark = pytest.mark.ranks

LR = 0.1


def state(actor: Any) -> dict[str, Any]:
    """All that a step may move: weights, buffers, the optimizer and the schedule."""
    model = {k: v for m in actor.model.unwrapped for k, v in m.state_dict().items()}
    return copy.deepcopy([model, actor.optimizer.state_dict(), actor.scheduler.state_dict()])


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for k in value for x in flat(value[k])]
    return [x for v in value for x in flat(v)] if isinstance(value, (list, tuple)) else [value]


def same(one: Any, other: Any) -> bool:
    pairs = zip(flat(one), flat(other), strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def off_at_first(s: RankSlice) -> np.ndarray:
    """Log-probs of a server that finds the first trained token next to impossible."""
    return np.where(s.loss_mask & (s.loss_mask.cumsum() == 1), -40, s.rollout_log_probs)


def train(checkpoint: Path, optimizer: str) -> dict[str, Any]:
    """Five steps during a warm-up of four; the third batch holds a NaN, and one token of the fourth is far off."""
    config = configuration(
        checkpoint,
        optimizer=optimizer,
        lr=LR,
        lr_warmup_iters=4,
        clip_grad=0.0,
        min_ess=0.2,
        transformer_overrides=VARIANTS["glm"].overrides,
        use_rollout_routing_replay=True,
    )
    hf, out = read_hf_facts(checkpoint), {"lr": [], "moved": [], "biases_moved": [], "by": []}
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12)]))
        bad = [replace(s, advantages=s.advantages * np.float32("nan")) for s in slices]
        name = "decoder.layers.1.mlp.router."
        far = [replace(s, rollout_log_probs=off_at_first(s)) for s in slices]
        for batch in (slices, slices, bad, far, slices):
            old = actor.compute_log_probs(batch, None)
            before = state(actor)
            metrics = actor.train_step(batch, old, None)
            after = state(actor)
            assert metrics["skipped_steps"] == float(batch is bad)
            assert metrics["low_ess_steps"] == float(batch is far), metrics["ess"]
            out["lr"].append(metrics["lr"])
            out["moved"].append(not same(before, after))
            bias, weight = f"{name}expert_bias", f"{name}weight"
            out["biases_moved"].append(not torch.equal(before[0][bias], after[0][bias]))
            gradient = dict(actor.model.unwrapped[0].named_parameters())[weight].main_grad
            out["by"].append([(before[0][weight] - after[0][weight]).norm(), gradient.norm()])
    return out


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("glm")
    checkpoint = write_checkpoint(VARIANTS["glm"], directory / "model")
    return in_ranks(1, directory / "ranks", train, checkpoint, "sgd")[0]


def test_the_learning_rate_reported_is_the_one_that_the_step_used(steps):
    assert steps["lr"] == pytest.approx([0, LR / 4, LR / 2, LR / 2, LR / 2])
    for lr, (moved, gradient), skipped in zip(steps["lr"], steps["by"], (0, 0, 1, 1, 0)):
        if not skipped:
            assert float(moved) == pytest.approx(lr * float(gradient), rel=1e-3)
    assert float(steps["by"][1][0]) > 0


def test_a_step_that_is_skipped_moves_nothing_and_the_others_move_biases_too(steps):
    assert steps["biases_moved"] == [True, True, False, False, True]
    assert steps["moved"] == [True, True, False, False, True]


def adam_steps(checkpoint: Path) -> list[bool]:
    config = configuration(
        checkpoint, optimizer="adam", transformer_overrides=VARIANTS["glm"].overrides
    )
    with actor_of(config) as actor:
        parts = [part.optimizer for part in actor.optimizer.chained_optimizers]
        return [group["fused"] for part in parts for group in part.param_groups]


def test_adam_goes_over_a_cpus_memory_once(tmp_path):
    checkpoint = write_checkpoint(VARIANTS["glm"], tmp_path / "model")
    [fused] = in_ranks(1, tmp_path / "ranks", adam_steps, checkpoint)
    assert fused and all(fused)

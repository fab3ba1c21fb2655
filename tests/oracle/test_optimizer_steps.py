"""Optimizer steps of a real actor: the learning rate they report, and a skipped one that moves nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3train.algo.loss_rows import LossRows, RowLoss
from r3train.algo.losses.ppo import ppo
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.families.read_facts import read_hf_facts
from r3train.layout.microbatch import slice_microbatch, Streams
from r3train.loop.prepare import build_microbatches
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


def fails_without_a_row(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    if rows.mask.device.type != "meta" and not rows.mask.any():
        raise ValueError("there is no row")
    return ppo(rows, algorithm)


def with_padding(checkpoint: Path) -> tuple[float, bool, int]:
    """A step whose second microbatch is padding only; (skipped steps, whether all stayed, errors of the loss)."""
    loss = f"{fails_without_a_row.__module__}:{fails_without_a_row.__name__}"
    config, hf = configuration(checkpoint, policy_loss=loss, lr=LR), read_hf_facts(checkpoint)
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9)]))
        [[padding]] = build_microbatches([[[]]], actor.topology, Streams(), first_microbatch_id=1)
        slices = [*slices, slice_microbatch(padding, actor.topology)]
        before, old = state(actor), actor.compute_log_probs(slices, None)
        metrics = actor.train_step(slices, old, None)
        return metrics["skipped_steps"], same(before, state(actor)), len(actor.loss_errors)


def test_a_loss_that_fails_on_padding_alone_skips_the_step_though_the_loss_is_finite(tmp_path):
    checkpoint = write_checkpoint(VARIANTS["moe4"], tmp_path / "model")
    assert in_ranks(1, tmp_path / "ranks", with_padding, checkpoint)[0] == (1.0, True, 1)


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

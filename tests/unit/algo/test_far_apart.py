"""Corrections and losses where engine, old actor and new actor are far from one another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.unit.algo.rollouts import loss_rows, sample

from r3train.algo.advantages.estimators import token_advantages
from r3train.algo.corrections import rollout_weights
from r3train.algo.divergence import MAX_LOG_RATIO
from r3train.algo.losses.ppo import gspo
from r3train.config.algorithm_settings import AlgorithmSection


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_ratio_of_a_long_sample_stays_finite_and_is_truncated(sign):
    """A gap of a nat in each of 200 tokens: e^200 is no float32."""
    rows = loss_rows(
        full(200, -2.0), full(200, -2.0), full(200, 1.0), rollout_log_probs=full(200, -2.0 - sign)
    )
    algorithm = AlgorithmSection(rollout_is="sequence", tis_clip=3.0, tis_clip_low=0.25)
    weights, _, sums = rollout_weights(rows, algorithm)
    assert weights.tolist() == [3.0 if sign > 0 else 0.25] * 200
    ratio = math.exp(sign * MAX_LOG_RATIO)
    assert sums["is_ratio"].item() == pytest.approx(200 * ratio, rel=1e-4)
    assert math.isfinite(sums["is_ratio_square"])


def test_the_ratio_of_a_sample_is_bounded_in_gspo():
    """A sample that became far likelier at every token: its ratio is e^10 at most, and finite."""
    new = full(4, -1.0).requires_grad_()
    rows = loss_rows(new, full(4, -120.0), full(4, -1.0))
    out = gspo(rows, AlgorithmSection())
    assert out.sums["ratio"].item() == pytest.approx(4 * math.exp(10.0), rel=1e-4)
    assert torch.isfinite(out.loss).all()


def test_fine_tuning_has_an_advantage_of_1_on_what_is_trained_alone():
    [[advantages]] = token_advantages(
        [[sample(0, 3)]], np.zeros((1, 1)), AlgorithmSection(loss_type="sft")
    )
    assert advantages.tolist() == [0.0, 1.0, 1.0]

"""Corrections and losses where engine, old actor and new actor are far from one another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.unit.algo.rollouts import loss_rows, sample

from r3train.algo.advantages.estimators import token_advantages
from r3train.algo.corrections import kept_rows, rollout_weights
from r3train.algo.divergence import MAX_LOG_RATIO
from r3train.algo.losses.ppo import gspo, ppo
from r3train.algo.policy_loss import microbatch_loss
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


def test_a_teacher_is_compared_with_the_policy_before_the_update():
    """In a later optimizer step of a rollout the actor has moved; the tokens are still the old one's."""
    new, old, teacher = full(2, -3.0).requires_grad_(), full(2, -1.0), full(2, -2.0)
    algorithm = AlgorithmSection(use_opd=True, opd_type="megatron", opd_kl_coef=0.5, eps_clip=0.9)
    rows = loss_rows(new, old, full(2, 1.0), teacher_log_probs=teacher)
    out = microbatch_loss(ppo, rows, algorithm)
    # old - teacher is 1: the advantage is 0.5, and the ratio e^-2
    assert out.sums["opd_reverse_kl"].item() == pytest.approx(2.0)
    assert out.sums["pg_loss"].item() == pytest.approx(-2 * 0.5 * math.exp(-2.0))


def test_a_row_without_an_advantage_is_not_dropped_by_the_mask_of_off_policy_samples():
    """The mask is of samples that are pushed away from: those with a negative advantage."""
    rows = loss_rows(
        full(3, -3.0),
        full(3, -1.0),
        torch.tensor([0.0, 1.0, -1.0]),
        samples=torch.tensor([0, 1, 2]),
    )
    keep, sums = kept_rows(rows, AlgorithmSection(opsm_delta=0.5))
    assert keep.tolist() == [True, True, False] and sums["opsm_dropped"] == 1


def test_fine_tuning_has_an_advantage_of_1_on_what_is_trained_alone():
    [[advantages]] = token_advantages(
        [[sample(0, 3)]], np.zeros((1, 1)), AlgorithmSection(loss_type="sft")
    )
    assert advantages.tolist() == [0.0, 1.0, 1.0]

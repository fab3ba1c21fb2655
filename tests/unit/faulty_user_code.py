"""Estimators, losses, checks and environments of a user that do what they must not."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from r3train.algo.losses.policy_losses import get_policy_loss


def advantages_exit(groups, rewards, algorithm):
    sys.exit(0)


def advantages_fail(groups, rewards, algorithm):
    raise KeyError("gold")


def advantages_fail_later(groups, rewards, algorithm):
    """Fail on all samples from the fifth on."""
    if groups[0][0].sample_id >= 4:
        raise KeyError("gold")
    return [[np.ones(sample.num_tokens) for sample in group] for group in groups]


_estimates = itertools.count(1)


def advantages_fail_behind_the_reference(groups, rewards, algorithm):
    """Fail on the second rollout when it comes again, with what the KL costs."""
    if next(_estimates) == 4:
        raise KeyError("gold")
    return [[np.ones(sample.num_tokens) for sample in group] for group in groups]


def loss_exits(rows, algorithm):
    sys.exit(0)


_losses = itertools.count()


def _comes_to_rank_1_again(rows) -> bool:
    of_values = rows.log_probs.device.type != "meta"
    return of_values and os.environ["RANK"] == "1" and next(_losses) >= 1


def loss_fails_later_on_rank_1(rows, algorithm):
    if _comes_to_rank_1_again(rows):
        raise KeyError("gold")
    return get_policy_loss("ppo")(rows, algorithm)


def loss_fails_between_its_sums_on_rank_1(rows, algorithm):
    """The other ranks of its samples wait for it, and go on although they are told that it failed."""
    rows.sample_sum(rows.log_probs)
    if _comes_to_rank_1_again(rows):
        raise KeyError("gold")
    for _ in range(2):
        try:
            rows.sample_mean(rows.log_probs)
        except ValueError:
            pass
    return get_policy_loss("ppo")(rows, algorithm)


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, fails):
        ctx.fails = fails
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise KeyError("gold")
        return gradient, None


def loss_fails_backward_later_on_rank_1(rows, algorithm):
    found = get_policy_loss("ppo")(rows, algorithm)
    fails = _comes_to_rank_1_again(rows)
    return replace(found, loss=_Undifferentiable.apply(found.loss, fails))


def loss_hangs_later_on_rank_1(rows, algorithm):
    while _comes_to_rank_1_again(rows):
        logging.getLogger("r3train").warning("the loss hangs")
        time.sleep(600)
    return get_policy_loss("ppo")(rows, algorithm)


def one(prompt, text, ids):
    return 1.0


def _exit(prompts):
    sys.exit(0)


one.check = _exit


class Fails:
    def __init__(self, prompt):
        raise KeyError("gold")

    async def step(self, turn):
        pass


class Exits(Fails):
    def __init__(self, prompt):
        sys.exit(0)


class _Mute(Exception):
    def __str__(self):
        raise RuntimeError


class FailsMutely(Fails):
    def __init__(self, prompt):
        raise _Mute


class OddTools(Fails):
    tools = 5

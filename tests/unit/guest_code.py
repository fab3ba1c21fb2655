"""Estimators, losses, checks and environments of a user that do what they must not."""

from __future__ import annotations

import itertools
import os
import sys
import time

import numpy as np


def advantages_exit(groups, rewards, algorithm):
    sys.exit(0)


def advantages_fail(groups, rewards, algorithm):
    raise KeyError("gold")


def advantages_fail_later(groups, rewards, algorithm):
    """Fail on all samples from the fifth on."""
    if groups[0][0].sample_id >= 4:
        raise KeyError("gold")
    return [[np.ones(sample.num_tokens) for sample in group] for group in groups]


def loss_exits(rows, algorithm):
    sys.exit(0)


def one(prompt, text, ids):
    return 1.0


def _exit(prompts):
    sys.exit(0)


one.check = _exit


def waits(prompt, text, ids):
    return 1.0


def _wait(prompts):
    time.sleep(60)


waits.check = _wait


def holds(prompt, text, ids):
    return 1.0


def _hold_the_interpreter(prompts):
    0 in itertools.repeat(1)  # for ever, and asks for no signal


holds.check = _hold_the_interpreter


def loss_leaves(rows, algorithm):
    os._exit(0)


class Waits:
    def __init__(self, prompt):
        time.sleep(60)

    async def step(self, turn):
        pass


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

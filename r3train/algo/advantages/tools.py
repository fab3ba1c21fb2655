"""The pieces that advantage estimators are built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from r3train.algo.trajectories import episode_places
from r3train.types import RolloutSample


def compares_samples(estimator: Callable) -> Callable:
    """Mark an estimator that needs two samples of a prompt: a run with one is refused."""
    estimator.min_samples_per_prompt = 2
    return estimator


def centred(rewards: np.ndarray) -> np.ndarray:
    """Subtract each group's mean, float64[G, n]; exactly 0 where a group's rewards are all equal.

    There the mean's rounding may leave a residue, which a division by a small std would blow up.
    """
    equal = rewards.max(axis=1, keepdims=True) == rewards.min(axis=1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def spread(
    groups: Sequence[Sequence[RolloutSample]], advantages: np.ndarray
) -> list[list[np.ndarray]]:
    """Give every token its episode's advantage.

    advantages: float[G, n], one an episode.  Returns float32[T] for each sample of each group.
    """
    return [
        [
            np.full(sample.num_tokens, own[place], dtype=np.float32)
            for sample, place in zip(group, episode_places(group), strict=True)
        ]
        for group, own in zip(groups, advantages, strict=True)
    ]

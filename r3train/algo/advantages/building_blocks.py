"""The pieces that advantage estimators are built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from r3train.algo.reward_stats import zero_variance
from r3train.algo.trajectories import episode_places
from r3train.types import RolloutSample


def compares_samples(estimator: Callable) -> Callable:
    """Mark an estimator that needs two samples of a prompt: a run with one is refused."""
    estimator.min_samples_per_prompt = 2
    return estimator


def reads_token_rewards(estimator: Callable) -> Callable:
    """Mark an estimator with a fourth argument, the rewards of single tokens (``token_advantages``)."""
    estimator.reads_token_rewards = True
    return estimator


def discounted(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Sum up the rewards from each step on, discounted: float64[n] -> float64[n].

    >>> discounted(np.array([1.0, 0.0, 8.0]), 0.5)
    array([3., 4., 8.])
    """
    # of each step the sum over the next 1, 2, 4, ... steps
    returns, span = rewards.copy(), 1
    while span < len(returns):
        returns[:-span] += gamma**span * returns[span:]
        span *= 2
    return returns


def centred(rewards: np.ndarray) -> np.ndarray:
    """Subtract each group's mean, float64[G, n]; exactly 0 where a group's rewards are equal.

    There rounding leaves a residue, which a division by a small std would blow up.
    """
    equal = zero_variance(rewards)[:, None]
    return np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def whitened(
    groups: Sequence[Sequence[RolloutSample]], advantages: Sequence[Sequence[np.ndarray]]
) -> list[list[np.ndarray]]:
    """Shift and scale advantages to mean 0 and variance 1 (ddof = 1) over the rollout's loss tokens.

    advantages: float[T] for each sample of each group.  With fewer than two loss tokens they are returned unchanged.
    """
    masks = [sample.loss_mask for group in groups for sample in group]
    counted = np.concatenate(
        [
            values[mask]
            for values, mask in zip(
                (a for group_advantages in advantages for a in group_advantages), masks, strict=True
            )
        ]
    ).astype(np.float64)
    if len(counted) < 2:
        return [list(group_advantages) for group_advantages in advantages]
    mean, scale = counted.mean(), 1.0 / np.sqrt(counted.var(ddof=1) + 1e-8)
    return [
        [(values - mean) * scale for values in group_advantages] for group_advantages in advantages
    ]


def spread(
    groups: Sequence[Sequence[RolloutSample]], advantages: np.ndarray
) -> list[list[np.ndarray]]:
    """Give every token its episode's advantage.

    advantages: float[G, n], one per episode.  Returns float32[T] for each sample of each group.
    """
    return [
        [
            np.full(sample.num_tokens, group_advantages[place], dtype=np.float32)
            for sample, place in zip(group, episode_places(group), strict=True)
        ]
        for group, group_advantages in zip(groups, advantages, strict=True)
    ]

"""The rewards of one rollout in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


# Rewards of one group that differ by less, in standard deviations, are taken as equal.
_EQUAL = 1e-6


def zero_variance(rewards: np.ndarray) -> np.ndarray:
    """Tell which groups teach nothing, for their rewards are equal: [..., n] -> bool[...].

    Equal means a standard deviation (ddof = 0) of at most 1e-6: rewards that are sums of parts differ
    by their rounding.
    """
    return rewards.std(axis=-1) <= _EQUAL


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The rewards of G groups of n episodes in numbers."""

    num_groups: int
    num_zero_variance: int  # groups whose rewards are equal: they teach nothing
    num_all_best: int  # of those, the groups that sit at the batch's highest reward
    mean: float  # over all episodes
    std: float  # over all episodes, ddof = 0
    min: float
    max: float
    group_std_mean: float  # mean over groups of the sample std (ddof = 1)


def group_stats(rewards: np.ndarray) -> GroupStats:
    """Describe a rollout's rewards, float[G, n].

    Raises ValueError for another shape and for a reward that is not finite, naming its place.
    """
    rewards = _checked(rewards)
    equal = zero_variance(rewards)
    ddof = 1 if rewards.shape[1] > 1 else 0
    return GroupStats(
        num_groups=int(rewards.shape[0]),
        num_zero_variance=int(equal.sum()),
        num_all_best=int((equal & (rewards[:, 0] == rewards.max())).sum()),
        mean=float(rewards.mean()),
        std=float(rewards.std()),
        min=float(rewards.min()),
        max=float(rewards.max()),
        group_std_mean=float(rewards.std(axis=1, ddof=ddof).mean()),
    )


def _checked(rewards: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)}, expected [groups, samples], neither 0"
        )
    bad = np.argwhere(~np.isfinite(rewards))
    if len(bad):
        group, sample = (int(i) for i in bad[0])
        raise ValueError(
            f"the reward of sample {sample} in group {group} is {rewards[group, sample]}, "
            f"expected a finite number ({len(bad)} such rewards in the batch)"
        )
    return rewards

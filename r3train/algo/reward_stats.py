"""The rewards of one rollout in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The rewards of G groups of n episodes in numbers."""

    num_groups: int
    num_zero_variance: int  # groups whose rewards are all equal: they teach nothing
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
    zero_variance = rewards.max(axis=1) == rewards.min(axis=1)
    ddof = 1 if rewards.shape[1] > 1 else 0
    return GroupStats(
        num_groups=int(rewards.shape[0]),
        num_zero_variance=int(zero_variance.sum()),
        num_all_best=int((zero_variance & (rewards[:, 0] == rewards.max())).sum()),
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

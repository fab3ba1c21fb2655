"""The rewards of one rollout in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

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
    mean: float  # over all episodes
    std: float  # over all episodes, ddof = 0
    min: float
    max: float
    # {k: pass@k} for k = 1, 2, 4, ... up to n, where all rewards are within 0 and 1; else empty
    pass_at_k: dict[int, float]


def group_stats(rewards: np.ndarray) -> GroupStats:
    """Describe a rollout's rewards, float[G, n].

    Raises ValueError for another shape and for a reward that is not finite, naming its place.
    """
    rewards = _checked(rewards)
    return GroupStats(
        num_groups=int(rewards.shape[0]),
        num_zero_variance=int(zero_variance(rewards).sum()),
        mean=float(rewards.mean()),
        std=float(rewards.std()),
        min=float(rewards.min()),
        max=float(rewards.max()),
        pass_at_k=pass_at_k(rewards),
    )


def pass_at_k(rewards: np.ndarray) -> dict[int, float]:
    """Estimate, for k = 1, 2, 4, ... up to n, the chance that one of k answers has a reward of 1.

    rewards: float[G, n].  Of a group with c such answers: ``1 - C(n - c, k) / C(n, k)``, averaged over
    groups.  Empty if a reward lies outside 0 to 1: it is no share of success.
    Source: M. Chen et al., arXiv 2107.03374, equation 1.

    >>> pass_at_k(np.array([[1.0, 0.0, 0.0, 0.0]]))
    {1: 0.25, 2: 0.5, 4: 1.0}
    """
    if rewards.min() < 0 or rewards.max() > 1:
        return {}
    n = rewards.shape[1]
    failed = (rewards < 1).sum(axis=1).tolist()
    powers = [1 << i for i in range(n.bit_length())]
    return {k: float(np.mean([1 - comb(f, k) / comb(n, k) for f in failed])) for k in powers}


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

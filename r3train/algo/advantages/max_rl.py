"""Maximum-likelihood RL: the group's mean reward as the scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.algo.advantages.building_blocks import centred, compares_samples, spread
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RolloutSample


@compares_samples
def max_rl(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Score each episode ``(R - mean) / mean`` of its group; 0 where the mean is 0 or below.

    With rewards of 0 and 1 a prompt that is seldom solved weighs more, as in the gradient of the
    log-likelihood of success.  A mean of n rewards that are not negative is at least their largest / n; with negative
    ones, of a length penalty say, it may be next to 0, and the divisor is bounded so: no advantage is above 2 n.
    Source: prime-rl's estimator of the same name, which has no such bound.
    """
    mean = rewards.mean(axis=1, keepdims=True)
    divisor = np.maximum(mean, np.abs(rewards).max(axis=1, keepdims=True) / rewards.shape[1])
    positive = mean > 0
    scaled = centred(rewards) / np.where(positive, divisor, 1.0)
    return spread(groups, np.where(positive, scaled, 0.0))

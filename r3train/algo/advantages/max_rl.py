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
    log-likelihood of success.
    Source: prime-rl's estimator of the same name.
    """
    mean = rewards.mean(axis=1, keepdims=True)
    positive = mean > 0
    return spread(groups, np.where(positive, centred(rewards) / np.where(positive, mean, 1.0), 0.0))

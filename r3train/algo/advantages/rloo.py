"""REINFORCE leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.algo.advantages.building_blocks import centred, compares_samples, spread
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RolloutSample


@compares_samples
def rloo(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Score each episode against the mean of the others of its group: ``n / (n - 1) (R - mean)``.

    Source: arXiv 2402.14740, section 2.3.
    """
    n = rewards.shape[1]
    return spread(groups, n / (n - 1) * centred(rewards))

"""Group-relative policy optimization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.algo.advantages.building_blocks import centred, compares_samples, spread
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RolloutSample


@compares_samples
def grpo(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Score each episode against its group: ``(R - mean) / (std + 1e-6)``.

    The std is the sample std (ddof = 1), as torch.std computes it and as miles, slime and TRL use
    it; the paper does not say.  Without ``grpo_std_normalization`` the advantage is ``R - mean``
    (Dr. GRPO, arXiv 2503.20783).
    Source: arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    advantages = centred(rewards)
    if algorithm.grpo_std_normalization:
        advantages = advantages / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    return spread(groups, advantages)

"""REINFORCE++: returns that are whitened over the rollout, with or without the group's mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.algo.advantages.tools import centred, compares_samples, spread, whitened
from r3train.config.algorithm import AlgorithmSection
from r3train.types import RolloutSample


def reinforce_plus_plus(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Discount the reward from the last loss token back, ``gamma^(last - t) R``, and whiten.

    ``last - t`` counts loss tokens.  Groups do not matter: one sample a prompt is enough.
    Source: arXiv 2501.03262, section 3.2, without a KL term in the reward.
    """
    returns = spread(groups, rewards)
    for group, of_group in zip(groups, returns):
        for sample, own in zip(group, of_group):
            to_go = np.cumsum(sample.loss_mask[::-1])[::-1] - 1  # loss tokens after this one
            own *= algorithm.gamma ** np.maximum(to_go, 0)
    return whitened(groups, returns)


@compares_samples
def reinforce_plus_plus_baseline(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Subtract the group's mean, then whiten over the loss tokens of the whole rollout.

    Source: arXiv 2501.03262, section 3.3.
    """
    return whitened(groups, spread(groups, centred(rewards)))

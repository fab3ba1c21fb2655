"""REINFORCE++: returns that are whitened over the rollout, with or without the group's mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.algo.advantages.building_blocks import (
    centred,
    compares_samples,
    discounted,
    reads_token_rewards,
    spread,
    whitened,
)
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RolloutSample


@reads_token_rewards
def reinforce_plus_plus(
    groups: Sequence[Sequence[RolloutSample]],
    rewards: np.ndarray,
    algorithm: AlgorithmSection,
    token_rewards: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[list[np.ndarray]]:
    """Discount rewards from the last loss token back, ``sum of gamma^(s - t) r_s`` over s >= t; whiten.

    r is R at a sample's last loss token, and next to it the token's own reward (--kl-coef).  ``s - t``
    counts loss tokens.  Groups do not matter: one sample a prompt is enough.
    token_rewards: float64[T] for each sample, see ``token_advantages``.
    Source: arXiv 2501.03262, section 3.2.
    """
    returns = spread(groups, rewards)
    for g, (group, group_returns) in enumerate(zip(groups, returns)):
        for i, (sample, sample_returns) in enumerate(zip(group, group_returns)):
            places = np.flatnonzero(sample.loss_mask)
            if not len(places):
                continue
            loss_token_rewards = np.zeros(len(places))
            loss_token_rewards[-1] = sample_returns[0]
            if token_rewards is not None:
                loss_token_rewards += token_rewards[g][i][places]
            sample_returns[places] = discounted(loss_token_rewards, algorithm.gamma)
    return whitened(groups, returns)


@compares_samples
def reinforce_plus_plus_baseline(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Subtract the group's mean, then whiten over the loss tokens of the whole rollout.

    Source: arXiv 2501.03262, section 3.3.
    """
    return whitened(groups, spread(groups, centred(rewards)))

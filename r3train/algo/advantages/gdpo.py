"""Group reward-decoupled normalization: several rewards, each compared in its group by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.algo.advantages.building_blocks import centred, compares_samples, spread
from r3train.algo.trajectories import episode_places
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RolloutSample


@compares_samples
def gdpo(
    groups: Sequence[Sequence[RolloutSample]], rewards: np.ndarray, algorithm: AlgorithmSection
) -> list[list[np.ndarray]]:
    """Normalise each of --reward-keys in its group as ``grpo`` does, add up, whiten over episodes.

    With A the sum of ``w_k (R_k - mean) / (std + 1e-6)`` of an episode, the advantage is
    ``(A - mean) / (std + 1e-6)`` over all episodes of the rollout (sample std both times).
    Raises ValueError naming a sample whose reward came without its parts.
    Source: arXiv 2601.05242, equations 4 to 6.
    """
    parts = np.array([_parts(group, len(algorithm.reward_keys)) for group in groups])
    weights = list(algorithm.weight_of_key.values())
    summed = np.zeros(parts.shape[:2])
    for weight, key_rewards in zip(weights, np.moveaxis(parts, 2, 0)):
        summed += (
            weight * centred(key_rewards) / (key_rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
        )
    return spread(groups, (summed - summed.mean()) / (summed.std(ddof=1) + 1e-6))


def _parts(group: Sequence[RolloutSample], num_keys: int) -> list[Sequence[float]]:
    """The parts of each episode's reward, [n][keys]."""
    parts_by_episode: dict[int, Sequence[float]] = {}
    for sample, place in zip(group, episode_places(group)):
        if sample.reward_parts is None or len(sample.reward_parts) != num_keys:
            raise ValueError(
                f"sample {sample.sample_id}: its reward came without the parts of --reward-keys, which"
                " --advantage-estimator gdpo needs: an environment's own rewards and rollouts that were"
                " recorded without them have none"
            )
        parts_by_episode.setdefault(place, sample.reward_parts)
    return list(parts_by_episode.values())

"""Advantage estimators by name, or by import path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from r3train.algo.advantages.gdpo import gdpo
from r3train.algo.advantages.grpo import grpo
from r3train.algo.advantages.max_rl import max_rl
from r3train.algo.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from r3train.algo.advantages.rloo import rloo
from r3train.algo.advantages.building_blocks import whitened
from r3train.algo.trajectories import episode_places
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.user_code import call_within, find_user_code, running_user_code, require_function
from r3train.types import RolloutSample

# (groups, rewards, algorithm) -> float[T] for each sample of each group.
# groups: [G][samples], the whole rollout.  rewards: float64[G, n], one for each episode of a group.
# One that is marked ``building_blocks.reads_token_rewards`` is called with these too where there are any.
# A sample is an episode, unless --environment-samples is turn: then an episode has a sample for
# each turn, and episodes are in the order of their first samples (``building_blocks.spread`` knows it).
AdvantageEstimator = Callable[
    [Sequence[Sequence[RolloutSample]], np.ndarray, AlgorithmSection], list[list[np.ndarray]]
]

ADVANTAGES: dict[str, AdvantageEstimator] = {
    "gdpo": gdpo,
    "grpo": grpo,
    "max_rl": max_rl,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
}
_FLAG = "--advantage-estimator"
LIMIT_S = 1800.0  # the other ranks wait for it, as long as rank 0 is alive


def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator registered as ``name``, or the function that "module:function" names.

    Raises ValueError, naming the flag, for an unknown name, for a path that cannot be imported, and
    for anything but a plain function (groups, rewards, algorithm).
    """
    found = find_user_code(_FLAG, name, ADVANTAGES)
    return require_function(_FLAG, name, found, "groups", "rewards", "algorithm")


def check_advantages(algorithm: AlgorithmSection, samples_per_prompt: int) -> None:
    """Check at start-up that the estimator can work with the settings; raises ValueError."""
    name = algorithm.advantage_estimator
    needed = getattr(get_advantage_estimator(name), "min_samples_per_prompt", 1)
    if samples_per_prompt < needed:
        raise ValueError(
            f"{_FLAG} {name} compares the samples of a prompt: n_samples_per_prompt must be at"
            f" least {needed}, got {samples_per_prompt}"
        )


def token_advantages(
    groups: Sequence[Sequence[RolloutSample]],
    rewards: np.ndarray,
    algorithm: AlgorithmSection,
    token_rewards: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[list[np.ndarray]]:
    """Run the configured estimator: float32[T] for each sample of each group, 0 outside its mask.

    token_rewards: what single tokens earn next to their episode's reward (--kl-coef), float64[T] for each
    sample, 0 outside its mask.  An estimator that does not read them gets their sum in the episode's reward.

    With --loss-type sft there is none, and every advantage is 1.
    With ``normalize_advantages`` they are whitened afterwards.

    Raises ValueError, naming the estimator, where it raises, and also the sample where it returns
    anything but a finite number for each token.
    """
    if algorithm.loss_type == "sft":
        return [[s.loss_mask.astype(np.float32) for s in group] for group in groups]
    name = algorithm.advantage_estimator
    estimator = get_advantage_estimator(name)
    arguments: tuple = (groups, rewards, algorithm)
    if token_rewards is not None and getattr(estimator, "reads_token_rewards", False):
        arguments += (token_rewards,)
    elif token_rewards is not None:
        summed_rewards = rewards.copy()
        for group, values, group_values in zip(groups, summed_rewards, token_rewards, strict=True):
            np.add.at(values, episode_places(group), [tokens.sum() for tokens in group_values])
        arguments = (groups, summed_rewards, algorithm)
    with running_user_code(f"{_FLAG} {name}"):
        found = call_within(LIMIT_S, lambda: estimator(*arguments))
        is_list = isinstance(found, (list, tuple))
        got = [len(values) for values in found] if is_list else type(found).__name__
    expected = [len(group) for group in groups]
    if got != expected:
        raise ValueError(
            f"{_FLAG} {name}: returned {got}, expected a list for each group with an array for"
            f" each sample: {expected}"
        )
    checked = [
        [_checked(name, sample, values) for sample, values in zip(group, group_values)]
        for group, group_values in zip(groups, found)
    ]
    if not algorithm.normalize_advantages:
        return checked
    return [
        [
            np.where(s.loss_mask, values, 0.0).astype(np.float32)
            for s, values in zip(group, group_values)
        ]
        for group, group_values in zip(groups, whitened(groups, checked))
    ]


def _checked(name: str, sample: RolloutSample, advantages: np.ndarray) -> np.ndarray:
    with running_user_code(f"{_FLAG} {name}: sample {sample.sample_id}"):
        advantages = np.asarray(advantages, dtype=np.float32)
    if advantages.shape != sample.loss_mask.shape:
        raise ValueError(
            f"{_FLAG} {name}: sample {sample.sample_id} got advantages of shape"
            f" {list(advantages.shape)}, expected one for each of its {sample.num_tokens} tokens"
        )
    advantages = np.where(sample.loss_mask, advantages, np.float32(0.0))
    if not np.isfinite(advantages).all():
        raise ValueError(
            f"{_FLAG} {name}: sample {sample.sample_id} got an advantage that is not finite"
        )
    return advantages

"""Checks of the learning rule that need its code and no data."""

from __future__ import annotations

from r3train.algo.advantages.estimators import check_advantages
from r3train.algo.losses.policy_losses import check_policy_loss
from r3train.config.algorithm_settings import AlgorithmSection


def check_algorithm(algorithm: AlgorithmSection, samples_per_prompt: int) -> None:
    """Find and check everything that the section names, at start-up; raises ValueError."""
    if algorithm.loss_type == "sft":
        return
    check_advantages(algorithm, samples_per_prompt)
    check_policy_loss(algorithm)

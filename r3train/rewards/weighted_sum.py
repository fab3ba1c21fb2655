"""Rewards that are weighted sums of several numbers (--reward-keys)."""

from __future__ import annotations

from dataclasses import replace

from r3train.types import RolloutSample, Scored


class SummedReward(float):
    """A reward that is a weighted sum, with the numbers that it is made of."""

    parts: tuple[float, ...]


def scored(sample: RolloutSample, reward: float) -> Scored:
    """A sample with its reward, and on it the parts of that reward if it has any."""
    parts = getattr(reward, "parts", None)
    return (sample if parts is None else replace(sample, reward_parts=parts)), float(reward)

"""Rewards of answers, by name or by import path."""

from r3train.rewards.registry import REWARDS, Reward, get_reward

__all__ = ["REWARDS", "Reward", "get_reward"]

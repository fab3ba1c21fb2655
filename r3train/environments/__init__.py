"""Environments: what answers a model between its turns, by name or by import path."""

from r3train.environments.base import Environment, StepResult, Turn
from r3train.environments.registry import ENVIRONMENTS, get_environment

__all__ = ["ENVIRONMENTS", "Environment", "StepResult", "Turn", "get_environment"]

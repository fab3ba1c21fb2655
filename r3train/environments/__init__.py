"""Environments, by name or by import path: they answer a model between its turns."""

from r3train.environments.environment import Environment, StepResult, Turn
from r3train.environments.named_environments import ENVIRONMENTS, get_environment

__all__ = ["ENVIRONMENTS", "Environment", "StepResult", "Turn", "get_environment"]

"""Environments, by name or by import path: they answer a model between its turns."""

from r3train.environments.base import Environment, StepResult, Turn
from r3train.environments.registry import ENVIRONMENTS, get_environment

__all__ = ["ENVIRONMENTS", "Environment", "StepResult", "Turn", "get_environment"]

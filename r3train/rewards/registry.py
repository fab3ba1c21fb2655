"""Rewards by name, or by import path."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

from r3train.rewards.accepted_words import accepted_words
from r3train.rewards.exact_match import exact_match
from r3train.rewards.math import MathReward
from r3train.types import Prompt

RewardFunction = Callable[[Prompt, str, list[int]], float]

# name -> makes the reward, given the seconds that one call may take
REWARDS: dict[str, Callable[[float], RewardFunction]] = {
    "accepted_words": lambda timeout_s: accepted_words,
    "exact_match": lambda timeout_s: exact_match,
    "math": MathReward,
}


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function whose result is known to be a finite number."""

    name: str
    function: RewardFunction
    bounds_its_time: bool  # the function itself ends a call that takes too long

    def __call__(self, prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
        """The reward of one response; raises ValueError naming the prompt where there is none."""
        try:
            value = self.function(prompt, response_text, response_ids)
        except Exception as error:  # a custom reward may raise anything; say which prompt it was
            if isinstance(error, ValueError) and prompt.prompt_id in str(error):
                raise
            raise ValueError(
                f"prompt {prompt.prompt_id}: reward {self.name} raised"
                f" {type(error).__name__}: {error}"
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"prompt {prompt.prompt_id}: reward {self.name} must be a finite number,"
                f" got {value!r}"
            )
        return number

    def close(self) -> None:
        """End whatever the reward holds open."""
        if hasattr(self.function, "close"):
            self.function.close()


def get_reward(
    rm_type: str, custom_rm_path: str | None = None, *, timeout_s: float = 10.0
) -> Reward:
    """The reward registered as ``rm_type``, or the function that ``custom_rm_path`` names.

    ``custom_rm_path`` is "module:function"; the function takes (prompt, response_text,
    response_ids) and returns a number.  Raises ValueError for an unknown name, with the nearest
    known one, and for a path that cannot be imported or is no function.
    """
    if custom_rm_path is not None:
        return Reward(custom_rm_path, _imported(custom_rm_path), bounds_its_time=False)
    if rm_type not in REWARDS:
        close = difflib.get_close_matches(rm_type, REWARDS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown rm_type {rm_type!r}, there are {', '.join(REWARDS)}.{hint}")
    return Reward(rm_type, REWARDS[rm_type](timeout_s), bounds_its_time=True)


def _imported(path: str) -> RewardFunction:
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"custom_rm_path must be module:function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ValueError(
            f"custom_rm_path {path}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"custom_rm_path {path}: {module_name} has no function {name}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"custom_rm_path {path}: must be a plain function, not an async one")
    return function

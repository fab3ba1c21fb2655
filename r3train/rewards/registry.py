"""Rewards by name, or by import path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from r3train.plugs import find_plug, import_plug, require_function
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
        """Score one response; raise ValueError naming the prompt if the function fails."""
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

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError naming a prompt whose label the reward cannot use.

        A reward of r3train scores an empty answer to every prompt, or has a ``check`` of its own; so
        may a custom one, as an attribute: a function of the list of prompts that raises ValueError.
        """
        own = getattr(self.function, "check", None)
        if own is not None:
            try:
                own(prompts)
            except Exception as error:  # a custom check may raise anything
                raise ValueError(f"reward {self.name}: {error}") from error
        elif self.bounds_its_time:
            for prompt in prompts:
                self(prompt, "", [])

    def close(self) -> None:
        """Close the reward function, if it can be closed."""
        if hasattr(self.function, "close"):
            self.function.close()


def get_reward(
    rm_type: str, custom_rm_path: str | None = None, *, timeout_s: float = 10.0
) -> Reward:
    """Return the reward registered as ``rm_type``, or the function that "module:function" names.

    Such a path stands in ``custom_rm_path``, which wins, or in ``rm_type``; the function takes
    (prompt, response_text, response_ids) and returns a number.  Raises ValueError, naming the flag,
    for an unknown name, for a path that cannot be imported, and for anything but a plain function
    of three arguments.
    """
    flag, name = "--rm-type", rm_type
    if custom_rm_path is not None:
        flag, name = "--custom-rm-path", custom_rm_path
    elif ":" not in rm_type:
        return Reward(name, find_plug(flag, name, REWARDS)(timeout_s), bounds_its_time=True)
    function = import_plug(flag, name)
    require_function(flag, name, function, "prompt", "response_text", "response_ids")
    return Reward(name, function, bounds_its_time=False)

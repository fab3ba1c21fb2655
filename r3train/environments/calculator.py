"""A calculator with a running total: the example of an environment of several turns.

The model presses keys: a number word is added (subtracted after ``minus``), ``clear`` starts from
0, ``done`` ends.  After every turn the calculator shows ``total <number>``.  The prompt asks for a
total, and each step towards it is rewarded.
"""

from __future__ import annotations

from r3train.environments.environment import StepResult, Turn
from r3train.types import Prompt

NUMBERS = [str(number) for number in range(21)]
TOO_MANY = "many"  # a total that no word names
KEYS = ("minus", "clear", "done")


class Calculator:
    """One episode.  The prompt's label is the asked total, an integer above 0."""

    def __init__(self, prompt: Prompt) -> None:
        label = prompt.label
        if not isinstance(label, int) or isinstance(label, bool) or label < 1:
            raise ValueError(f"the calculator needs a label above 0, got {label!r}")
        self._asked = label
        self._total = 0

    def _closeness(self) -> float:
        """Return 1 at the asked total, 0 at a total of 0 and at twice the asked total or more."""
        return max(0.0, 1.0 - abs(self._asked - self._total) / self._asked)

    async def step(self, turn: Turn) -> StepResult:
        """Press the turn's keys; the reward is how much closer they came."""
        before = self._closeness()
        sign, done = 1, False
        for word in turn.text.split():
            if word in NUMBERS:
                self._total += sign * int(word)
                sign = 1
            elif word == "minus":
                sign = -1
            elif word == "clear":
                self._total = 0
            elif word == "done":
                done = True
                break
        shown = str(self._total) if str(self._total) in NUMBERS else TOO_MANY
        return StepResult(f"total {shown}", done=done, reward=self._closeness() - before)


def calculator_words() -> list[str]:
    """Every word of the task in the order of the vocabulary, without the special tokens."""
    return [*NUMBERS, TOO_MANY, *KEYS, "total", "make", "please", "count", "to"]


def calculator_prompts() -> list[dict]:
    """Every phrasing of every total as a line of prompts.jsonl."""
    openings = ("make", "count to", "please make", "please count to")
    return [
        {"input": f"{opening} {total}", "label": total, "metadata": {}}
        for opening in openings
        for total in range(5, 21)
    ]

"""Reward for the one right answer, word for word."""

from __future__ import annotations

from r3train.rewards.answers import written
from r3train.rewards.reward import bad_label
from r3train.types import Prompt


def exact_match(prompt: Prompt, text: str) -> float:
    """1 where the response is the label, white space at either end aside, else 0.

    The label is text or a number.  Raises ValueError for a label of another kind.
    """
    label = written(prompt.label)
    if label is None:
        raise bad_label(prompt, "exact_match needs a label of text or a number")
    return float(text.strip() == label.strip())

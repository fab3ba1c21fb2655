"""Reward for words of an accepted set: the task of the tiny model."""

from __future__ import annotations

from r3train.rewards.reward import bad_label
from r3train.types import Prompt


def accepted_words(prompt: Prompt, text: str) -> float:
    """The share of the response's words that the label accepts, in 0..1.

    The label is a list of words, or words with spaces between.  ``metadata["num_words"]`` is
    the number of words asked for, if given; a shorter response is divided by that number.
    Raises ValueError for a label or num_words of another kind.
    """
    accepted = prompt.label.split() if isinstance(prompt.label, str) else prompt.label
    if (
        not isinstance(accepted, (list, tuple))
        or not accepted
        or not all(isinstance(word, str) for word in accepted)
    ):
        raise bad_label(prompt, "accepted_words needs a label of words")
    num_words = prompt.metadata.get("num_words", 0)
    if not isinstance(num_words, int) or isinstance(num_words, bool) or num_words < 0:
        raise ValueError(
            f"prompt {prompt.prompt_id}: num_words must be an integer of at least 0, got {num_words!r}"
        )
    words = text.split()
    right = sum(word in set(accepted) for word in words)
    return right / max(len(words), num_words, 1)

"""A reward that a random model can earn, for the laptop: it begins to write numbers."""

from __future__ import annotations

from r3train.types import Prompt


def share_of_digits(prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
    """The share of an answer's characters that are digits."""
    return sum(c.isdigit() for c in response_text) / max(1, len(response_text))

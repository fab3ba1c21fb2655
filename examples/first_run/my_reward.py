"""A reward of one's own, for docs/start/first_run.md."""

from r3train.types import Prompt


def share_of_right_words(prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
    """The share of the response's words that the label holds."""
    words = response_text.split()
    return sum(word in prompt.label for word in words) / max(len(words), 1)

"""A reward that never returns."""

from __future__ import annotations

import threading

from r3train.types import Prompt


def reward(prompt: Prompt, response_text: str, response_ids: list[int]) -> float:
    """Wait for ever."""
    threading.Event().wait()
    return 0.0

"""The interface of a reward of r3train."""

from __future__ import annotations

from typing import Any

from r3train.rewards.answers import written
from r3train.types import Prompt, RolloutSample


class Reward:
    """A reward of r3train: it bounds its own time, and scores an answer that takes longer."""

    name: str
    needs_label = False
    num_tried = (
        32  # rows whose label and empty answer are scored at the start; 0: it needs a server
    )
    num_checked = 200  # rows for ``check``

    async def __call__(self, sample: RolloutSample) -> Any:
        """Score a sample; raise ValueError naming the prompt for a label that it cannot use."""
        raise NotImplementedError

    def require_label(self, prompt: Prompt) -> None:
        """Raise ValueError for a label of another kind, looking at nothing else."""

    async def check(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that the reward cannot use, in some milliseconds."""

    def right_answer(self, prompt: Prompt) -> str | None:
        """The label as an answer that is right; None for a label that is none.  Of a list the first."""
        label = prompt.label
        return written(label[0] if isinstance(label, list) and label else label)

    def close(self) -> None:
        """End helpers."""


def bad_label(prompt: Prompt, needs: str) -> ValueError:
    """Make the error for a label that a reward cannot use; needs: what the reward expects."""
    return ValueError(f"prompt {prompt.prompt_id}: {needs}, got {repr(prompt.label)[:200]}")

"""Optimizer steps with a loss or a gradient that is not finite: skipped, kept, and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from r3train.loop.replay_source import dump_rollout
from r3train.types import Scored

DIRECTORY = "bad_steps"


class BadSteps:
    """Counts rollouts whose optimizer step was skipped; all ranks hold the same counts."""

    def __init__(self, max_in_a_row: int, run_dir: Path):
        self._max = max_in_a_row
        self._directory = run_dir / DIRECTORY
        self._in_a_row = 0
        self.total = 0

    def see(self, rollout_id: int, skipped: int, groups: Sequence[Sequence[Scored]] | None) -> str:
        """Take note of a rollout's skipped steps; returns what to tell people, or "".

        groups: the rollout, dumped for inspection, on rank 0; None elsewhere.
        """
        if not skipped:
            self._in_a_row = 0
            return ""
        self._in_a_row += 1
        self.total += skipped
        text = (
            f"rollout {rollout_id}: {skipped} optimizer step(s) skipped: the loss or a gradient is"
            f" not finite ({self._in_a_row} in a row, max_bad_steps {self._max})"
        )
        if groups is not None:
            text += f"; the batch is in {dump_rollout(self._directory, rollout_id, groups)}"
        return text

    def raise_if_too_many(self, text: str) -> None:
        """End the run after ``max_in_a_row``: its weights or its data are beyond repair."""
        if self._in_a_row >= self._max:
            raise FloatingPointError(text)

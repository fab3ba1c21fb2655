"""What became of every prompt that was drawn: one line of ``outcomes.jsonl`` each."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from r3train.data.json_lines import append_lines
from r3train.generation.buffer import Outcome

OUTCOMES_FILE = "outcomes.jsonl"


class OutcomeLog:
    """Appends outcomes as they happen: what is known survives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, outcome: Outcome) -> None:
        append_lines(self._path, [asdict(outcome)])

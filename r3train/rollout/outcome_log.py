"""What became of every prompt that was drawn: one line of ``outcomes.jsonl`` each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from r3train.rollout.group_buffer import Outcome

OUTCOMES_FILE = "outcomes.jsonl"


class OutcomeLog:
    """Appends outcomes as they happen; the file appears with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = None

    def write(self, outcome: Outcome) -> None:
        if self._file is None:
            # a line a write: what is known survives the process
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(asdict(outcome)) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

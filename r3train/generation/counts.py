"""Counts of the producer: tokens, finished samples, and how long it had nothing in flight."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from r3train.engine.backend import Drafts


@dataclass
class Counts:
    """Counters of one producer."""

    generated_tokens: int = 0
    finished_samples: int = 0
    resumed_rollouts: int = 0  # after an update aborted them
    retracted_answers: int = 0  # by a server, kept or not
    drafts_proposed: int = 0  # by servers that decode speculatively
    drafts_accepted: int = 0
    draft_verifications: int = 0
    recheck_tokens: int = 0  # of texts that servers rechecked
    waiting_s: float = 0.0  # time that the training thread waited for batches
    in_flight: int = 0  # slots taken, each by one rollout's call
    idle_s: float = 0.0  # time with nothing in flight

    def __post_init__(self) -> None:
        self._began = self._changed = time.monotonic()

    def change_in_flight(self, change: int) -> None:
        """Note that a rollout takes a slot (1), or gives it back (-1)."""
        now = time.monotonic()
        if self.in_flight == 0:
            self.idle_s += now - self._changed
        self.in_flight += change
        self._changed = now

    def add(self, drafts: Drafts) -> None:
        """Count what came of an answer's drafts."""
        self.drafts_proposed += drafts.proposed
        self.drafts_accepted += drafts.accepted
        self.draft_verifications += drafts.verifications

    def stats(self) -> dict[str, Any]:
        """Return the counts, and the seconds since the first."""
        self.change_in_flight(0)
        return asdict(self) | {"wall_s": self._changed - self._began}

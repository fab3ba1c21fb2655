"""Counts of the producer: tokens, finished samples, and how long it had nothing in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from r3train.types import RolloutSample

_WINDOW_S = 10.0


class Rates:
    """Counters of one producer."""

    def __init__(self) -> None:
        self.resumed = 0  # rollouts resumed after an update aborted them
        self.retracted = 0  # answers that a server retracted, kept or not
        self.rescored_tokens = 0  # of texts that servers computed again
        self.waiting_s = 0.0  # time that the training thread waited for batches
        self._generated_tokens = 0
        self._finished_samples = 0
        self._aborted_samples = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._began = time.monotonic()
        self._idle_s = 0.0
        self._idle_since: float | None = self._began

    def in_flight(self, count: int) -> None:
        """Note that ``count`` requests are in flight now."""
        now = time.monotonic()
        if count == 0 and self._idle_since is None:
            self._idle_since = now
        elif count and self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def tokens(self, count: int) -> None:
        """Count the tokens of an answer."""
        now = time.monotonic()
        self._generated_tokens += count
        self._recent.append((now, count))
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()

    def finished(self, samples: Sequence[RolloutSample]) -> None:
        self._finished_samples += len(samples)
        self._aborted_samples += sum(sample.finish_reason == "abort" for sample in samples)

    def stats(self) -> dict[str, Any]:
        """Return the counts; tokens_per_s is the rate of the last ten seconds."""
        now = time.monotonic()
        recent = [(at, tokens) for at, tokens in self._recent if at >= now - _WINDOW_S]
        span_s = max(now - recent[0][0], 1.0) if recent else 1.0
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        return {
            "generated_tokens": self._generated_tokens,
            "finished_samples": self._finished_samples,
            "aborted_samples": self._aborted_samples,
            "resumed_rollouts": self.resumed,
            "retracted_answers": self.retracted,
            "rescored_tokens": self.rescored_tokens,
            "mean_response_len": self._generated_tokens / max(self._finished_samples, 1),
            "tokens_per_s": sum(tokens for _, tokens in recent) / span_s,
            "waiting_s": self.waiting_s,
            "idle_s": idle_s,
            "wall_s": now - self._began,
        }

"""Seconds of a step, phase by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Times one step: ``with clock.phase("train"): ...`` adds to that phase's seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a phase; a phase may come several times in a step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def step_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return ``perf/<phase>_s`` of every phase, ``perf/step_s`` and ``perf/tokens_per_s``.

        tokens: of the rollout.
        """
        step_s = self.step_s()
        phases = {f"perf/{name}_s": seconds for name, seconds in self.seconds.items()}
        return {**phases, "perf/step_s": step_s, "perf/tokens_per_s": tokens / step_s}

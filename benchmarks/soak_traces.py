"""Memory and handles of a process over its life, and of one role over its lives. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from benchmarks.soak_processes import CONNECTIONS, HALF_CLOSED, KINDS, OTHER_SOCKETS, THREADS

# Before it a run is young: caches fill and buffers reach their size.
FROM_STEP = 50
# A process of its own settles in its first steps, and its first seconds.
SETTLE_S = 10.0
SETTLE_STEPS = 8
# Samples whose median is compared, and those at the end of a life that show it ending.
WINDOW = 10
ENDING = 2
# Samples of which the fewest handles count: a save's pipes, which come and go, are no leak.
HANDLES_WINDOW = 20
# A server's weight-update group is two sockets, and there is none while the server starts again.
# Pools make their threads when they are first needed.
MAY_GROW = {OTHER_SOCKETS: 2, THREADS: 2}
# Lives of about the same length, in steps, are compared.
SAME_AGE_STEPS = 6


@dataclass(frozen=True)
class Growth:
    """One comparison; sizes in bytes."""

    what: str
    early: float
    late: float

    @property
    def growth(self) -> float:
        return self.late / self.early - 1

    def __str__(self) -> str:
        sizes = f"{self.early / 1e6:.1f} MB -> {self.late / 1e6:.1f} MB"
        return f"{self.growth:+.1%} ({self.what}, {sizes})"


class Sample(NamedTuple):
    """A process at one moment: its age, steps trained by then, bytes of memory, handles by kind."""

    age_s: float
    step: int
    memory: int
    handles: Counter[str]


@dataclass
class Trace:
    """The samples of one process."""

    role: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    def add(self, age_s: float, step: int, memory: int, handles: Counter[str]) -> None:
        self.samples.append(Sample(age_s, step, memory, handles))

    @property
    def last_step(self) -> int:
        return self.samples[-1].step

    @property
    def lived_steps(self) -> int:
        return self.last_step - self.samples[0].step

    def settled(self, from_step: int = FROM_STEP) -> list[Sample]:
        """The samples after the process and the run have settled."""
        first = max(from_step, self.samples[0].step + SETTLE_STEPS)
        return [s for s in self.samples if s.age_s >= SETTLE_S and s.step >= first]

    def floors(self) -> tuple[Counter[str], Counter[str]] | None:
        """The fewest handles of each kind as it had settled, and at its end; None if too short."""
        settled = self.settled(0)
        if len(settled) < 2 * HANDLES_WINDOW:
            return None
        early, late = (
            Counter({kind: min(s.handles[kind] for s in part) for kind in KINDS})
            for part in (settled[:HANDLES_WINDOW], settled[-HANDLES_WINDOW:])
        )
        return early, late


def _memory(samples: Sequence[Sample]) -> float:
    return median(s.memory for s in samples)


def growth_within_life(trace: Trace) -> Growth | None:
    """The first settled window against the last; None for a life too short for two."""
    settled = trace.settled()
    if len(settled) < 2 * WINDOW:
        return None
    what = f"process {trace.pid}, steps {settled[0].step} to {settled[-1].step}"
    return Growth(what, _memory(settled[:WINDOW]), _memory(settled[-WINDOW:]))


def growth_across_lives(traces: Sequence[Trace]) -> list[Growth]:
    """The end of each life against that of the next but one that was about as long.

    The faults come in turn, so that a process ends as the one before the last did.  ``traces`` are
    of one role, in order of their start.
    """
    lives = [t for t in traces if len(t.settled(0)) >= WINDOW and t.last_step >= FROM_STEP]
    found = []
    for k, one in enumerate(lives):
        for other in lives[k + 2 :]:
            if abs(other.lived_steps - one.lived_steps) <= SAME_AGE_STEPS:
                what = f"lives that ended at steps {one.last_step} and {other.last_step}"
                ends = [_memory(t.samples[-WINDOW:-ENDING]) for t in (one, other)]
                found.append(Growth(what, *ends))
                break
    return found


def handles_gathered(trace: Trace, *, max_connections: int) -> list[str]:
    """Complaints about a process that holds, or has gathered, more than it may.

    Connections to servers are bounded by the requests that may be in flight, and no half-closed
    socket may stay; every other kind may not grow.
    """
    floors = trace.floors()
    if floors is None:
        return []
    early, late = floors
    fixed = {CONNECTIONS: max_connections, HALF_CLOSED: 0}
    bounds = {kind: fixed.get(kind, early[kind] + MAY_GROW.get(kind, 0)) for kind in KINDS}
    return [
        f"{trace.role} ({trace.pid}): {early[kind]} {kind} became {late[kind]},"
        f" at most {bounds[kind]} expected"
        for kind in KINDS
        if late[kind] > bounds[kind]
    ]

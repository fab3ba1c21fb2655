"""Memory and handles of a process over its life, and of one role over its lives. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.soak_handles import CONNECTIONS, HALF_CLOSED, KINDS, OTHER_SOCKETS

# Before it a run is young: caches fill and buffers reach their size.
FROM_STEP = 50
# A process of its own settles in its first steps, and its first seconds.
SETTLE_S = 10.0
SETTLE_STEPS = 8
# Samples whose median is compared, and those at the end of a life that show it ending.
WINDOW = 10
ENDING = 2
# Samples of which the fewest handles count: what is not always there (a save's pipes) is no leak.
HANDLES_WINDOW = 20
# A server's weight-update group is two sockets, and there is none while the server starts again.
MAY_GROW = {OTHER_SOCKETS: 2}
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


@dataclass
class Trace:
    """Samples of one process: age in seconds, steps trained by then, memory in bytes, handles by kind."""

    role: str
    pid: int
    ages_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    handles: list[Counter[str]] = field(default_factory=list)

    def add(self, age_s: float, step: int, memory: int, handles: Counter[str]) -> None:
        self.ages_s.append(age_s)
        self.steps.append(step)
        self.memory.append(memory)
        self.handles.append(handles)

    @property
    def lived_steps(self) -> int:
        return self.steps[-1] - self.steps[0]

    def settled(self, from_step: int = FROM_STEP) -> list[int]:
        """Indices of the samples after the process and the run have settled."""
        return [
            i
            for i, (age, step) in enumerate(zip(self.ages_s, self.steps, strict=True))
            if age >= SETTLE_S and step >= max(from_step, self.steps[0] + SETTLE_STEPS)
        ]

    def floors(self) -> tuple[Counter[str], Counter[str]] | None:
        """The fewest handles of each kind as it had settled, and at its end; None if too short."""
        settled = self.settled(0)
        if len(settled) < 2 * HANDLES_WINDOW:
            return None
        early, late = (
            Counter({kind: min(self.handles[i][kind] for i in part) for kind in KINDS})
            for part in (settled[:HANDLES_WINDOW], settled[-HANDLES_WINDOW:])
        )
        return early, late


def growth_within_life(trace: Trace, from_step: int = FROM_STEP) -> Growth | None:
    """The first settled window against the last; None for a life too short for two."""
    settled = trace.settled(from_step)
    if len(settled) < 2 * WINDOW:
        return None
    early = median(trace.memory[i] for i in settled[:WINDOW])
    late = median(trace.memory[i] for i in settled[-WINDOW:])
    first, last = trace.steps[settled[0]], trace.steps[settled[-1]]
    return Growth(f"process {trace.pid}, steps {first} to {last}", early, late)


def growth_across_lives(traces: Sequence[Trace], from_step: int = FROM_STEP) -> list[Growth]:
    """The end of each life against that of the next but one that was about as long.

    The faults come in turn, so that a process ends as the one before the last did.  ``traces`` are
    of one role, in order of their start.
    """
    lives = [t for t in traces if len(t.settled(0)) >= WINDOW and t.steps[-1] >= from_step]
    found = []
    for k, one in enumerate(lives):
        for other in lives[k + 2 :]:
            if abs(other.lived_steps - one.lived_steps) > SAME_AGE_STEPS:
                continue
            early = median(one.memory[-WINDOW:-ENDING])
            late = median(other.memory[-WINDOW:-ENDING])
            what = f"lives that ended at steps {one.steps[-1]} and {other.steps[-1]}"
            found.append(Growth(what, early, late))
            break
    return found


def handles_gathered(trace: Trace, *, max_connections: int) -> list[str]:
    """Complaints about a process that holds, or has gathered, more than it may.

    Connections to servers are bounded by what may be in flight, and no half-closed socket may stay;
    every other kind may not grow.
    """
    floors = trace.floors()
    if floors is None:
        return []
    early, late = floors
    complaints = []
    for kind in KINDS:
        bound = early[kind] + MAY_GROW.get(kind, 0)
        bound = {CONNECTIONS: max_connections, HALF_CLOSED: 0}.get(kind, bound)
        if late[kind] > bound:
            complaints.append(
                f"{trace.role} ({trace.pid}): {early[kind]} {kind} became {late[kind]},"
                f" at most {bound} expected"
            )
    return complaints

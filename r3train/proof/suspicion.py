"""Statistical claims: rounding, or a fault that lasts?

On GPUs two sound passes of one text are not equal: kernels depend on the batch, and prefill and decode round otherwise.  So a
statistic of their difference (a mean of |log-prob difference|, a share of rows) is compared with what is usual for it on this
server, and no single value fails.  A cumulative sum grows while the statistic is more than twice the usual, by 1 a step at
most, and falls by as much otherwise:

    S = max(0, S + clip(log((x + a) / (2 (usual + a))), -1, 1))    passed: S < 1; suspect: S < limit; failed: S >= limit

``usual`` is the median of the last 64 values that were not suspect, held within a quarter and four times the calibration,
so that a fault which grows slowly does not become usual.  ``a`` is what cannot be told from nothing.  (CUSUM; E. S. Page,
Biometrika 41, 1954.)

>>> gaps = Suspicions(limit=5.0)
>>> [round(gaps.see("BOUND", 0, x, start=0.010).sum, 2) for x in (0.011, 0.019, 0.060, 0.012)]
[0.0, 0.0, 1.0, 0.49]
>>> [gaps.verdict([gaps.see("BOUND", 0, 0.060, start=0.010)]) for _ in range(5)]
['suspect', 'suspect', 'suspect', 'suspect', 'failed']
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.proof.verdicts import FAILED, PASSED, SUSPECT
from r3train.types import Amount

Positive = Annotated[float, Meta(ge=0)]
# of --r3-suspect-limit
LIMIT = 5.0
SUSPECT_FROM = 1.0
# first values of a run by which recheck and agreement are calibrated
CALIBRATING = 8
# rows that cannot be told from none
ROWS_OF_NOTHING = 3
_FACTOR, _ANCHOR = 2.0, 4.0
_WINDOW, _WEIGHT_OF_START = 64, 8
# a value that leaves the sum above this is not usual
_USUAL_BELOW = 0.5
_SERVER = "a fault between server and sample: look for retractions, at its cache, at its stages"
# of each statistic: what it is a mean or a share of, if it is a share, what may be the cause of a large one
_MEANINGS = {
    "BOUND": (
        "with its experts replayed, actor and server are apart by",
        False,
        "tensors that an update does not reach: try --check-weight-update-equal",
    ),
    "DECODED": (
        "on tokens that the server decodes they are apart by",
        False,
        "a decode of other weights than its prefill: try a server without CUDA graphs",
    ),
    "ROUTER": (
        "rows in which the actor's own routers leave the server's experts:",
        True,
        "a router that an update does not reach: try --check-weight-update-equal",
    ),
    "WARM": (
        "with a cached half and without one it is apart by",
        False,
        "keys and values of other weights in its prefix cache",
    ),
    "decoded rows": ("rechecked decoded rows with other experts:", True, _SERVER),
    "prefilled rows": ("rechecked prefilled rows with other experts:", True, _SERVER),
    "log-probs": ("rechecked log-probs are off by", False, _SERVER),
    "routes": (
        "rows of the actor's own weights that share no expert with its own choice:",
        True,
        "routes of other tokens, layers or weights: r3train check-evidence tries misalignments",
    ),
    "sampling_mask": (
        "sampling masks without the trainer's likeliest token:",
        True,
        "masks of other tokens",
    ),
    "indexer": (
        "rows whose indexer's choice is as far as chance:",
        True,
        "choices of other tokens or layers",
    ),
}
# One token counts as so many times the calibrated mean at most: one expert chosen otherwise moves all that follow.
_MOST_OF_A_TOKEN = 30.0


@dataclass(frozen=True, slots=True)
class Statistic:
    """One value of a statistic, what was usual for it before, and its cumulative sum after it.

    name: of the test or the rows; usual: None while the first values calibrate it.
    """

    name: str
    server: Amount
    value: Positive
    usual: Positive | None
    sum: Positive


@dataclass(slots=True)
class _Suspicion:
    """The cumulative sum of one statistic of one server; start: its calibration."""

    start: float
    lowest: float
    highest: float
    calibrating: int
    sum: float = 0.0
    first: list[float] = field(default_factory=list)
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.usual.extend([self.start] * _WEIGHT_OF_START)

    def see(self, value: float, least: float) -> float | None:
        """Take a value; returns what was usual before it, None while it calibrates."""
        if len(self.first) < self.calibrating:
            self.first.append(value)
            if len(self.first) == self.calibrating:
                self.start = min(max(median(self.first), self.start), self.highest)
                self.usual.clear()
                self._begin()
            return None
        usual = min(max(median(self.usual), self.lowest * self.start), _ANCHOR * self.start)
        over = (value + least) / max(_FACTOR * (usual + least), 1e-300)
        step = math.log(max(over, 1e-300)) if math.isfinite(over) else 1.0
        step = min(1.0, max(-1.0, step))
        self.sum = max(0.0, self.sum + step)
        if step < 0 and self.sum < _USUAL_BELOW:
            self.usual.append(value)
        return usual


class Suspicions:
    """The statistics of one start of a run, by name and server.

    limit: of a sum, 0 where none fails.  calibrating: values that calibrate a statistic whose ``highest`` is given.
    """

    def __init__(self, limit: float = LIMIT, calibrating: int = CALIBRATING):
        self.limit, self.calibrating = limit, calibrating
        self._suspicions: dict[tuple[str, int], _Suspicion] = {}

    def see(
        self,
        name: str,
        server: int,
        value: float,
        *,
        start: float,
        least: float = 0.0,
        may_fall: bool = True,
        highest: float | None = None,
    ) -> Statistic:
        """Take a value of a statistic.

        start: what is usual, as it was measured; the first value's start counts.  least: what cannot be told from
        nothing, added to value and usual.  may_fall: the usual value may fall below the start.  highest: the run's
        first values raise the start to their median, but not above this, and are not judged; None: they are.
        """
        suspicion = self._suspicions.get((name, server))
        if suspicion is None:
            lowest = 1 / _ANCHOR if may_fall else 1.0
            calibrating = 0 if highest is None else self.calibrating
            most = math.inf if highest is None else highest
            suspicion = _Suspicion(start, lowest, most, calibrating)
            self._suspicions[name, server] = suspicion
        usual = suspicion.see(value, least)
        return Statistic(name, server, value, usual, suspicion.sum)

    def verdict(self, statistics: Iterable[Statistic]) -> str:
        """passed, suspect or failed."""
        return verdict_of(statistics, self.limit)


def verdict_of(statistics: Iterable[Statistic], limit: float) -> str:
    """passed, suspect or failed, by the largest sum; limit: see ``Suspicions``."""
    largest = max((s.sum for s in statistics), default=0.0)
    if limit and largest >= limit:
        return FAILED
    return SUSPECT if largest >= SUSPECT_FROM else PASSED


def suspicion_texts(statistics: Iterable[Statistic], limit: float, where: str) -> list[str]:
    """A line for each statistic that is suspect or failed: what it is, what it may mean, what to look at.

    where: "step 3" or "weight version 3".
    """
    lines = []
    for s in statistics:
        if s.sum >= SUSPECT_FROM:
            what, share, advice = _MEANINGS[s.name]
            value, usual = (f"{x:.2%}" if share else f"{x:.3g} nats" for x in (s.value, s.usual))
            lines.append(
                f"{s.name}: server {s.server}, {where}: {what} {value}, usual {usual}; suspicion {s.sum:.2f} of"
                f" {limit:g}: rounding, or {advice}"
            )
    return lines


def bounded_mean(off: np.ndarray, calibrated_mean: float) -> float:
    """The mean of |differences|, float[N] in nats, of which no token counts more than 30 times the calibrated mean."""
    return float(np.minimum(off, _MOST_OF_A_TOKEN * calibrated_mean).mean()) if len(off) else 0.0

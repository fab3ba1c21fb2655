"""What a report shows of a run's evidence: agreement by layer and step, and a verdict a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3train.proof.findings import Audit, AuditedStep, FAILED, NO_EVIDENCE, PASSED
from r3train.observe.report_metrics import PASSED as PASSED_METRIC

MAX_COLUMNS = 120


@dataclass(frozen=True)
class HeatMap:
    """Share of rows in which the trainer's own choice is the replayed one: [layers][columns]."""

    layers: list[int]
    columns: list[tuple[int, int]]  # first and last step of each
    values: list[list[float | None]]
    chance: float | None


@dataclass(frozen=True)
class StepCheck:
    """What the evidence says of one step; calls and rows are over all passes and layers.

    ``rows`` are the real ones: those replayed as recorded (``rows_replayed``), those of which
    missing slots were filled, and those that the router chose itself.
    """

    step: int
    verdict: str  # one of an Audit's
    calls: int = 0
    calls_expected: int = 0
    rows_replayed: int = 0
    rows: int = 0


def read_evidence(
    audit: Audit, records: Sequence[dict[str, Any]]
) -> tuple[HeatMap | None, list[StepCheck]]:
    """The heat map, and a verdict for every step that was trained; [] where no check was on.

    records: the run's metrics.  A step that they or the run's own verdict call failed is none that
    passed, whatever is left of its records; nor is one that failed before a later start trained it
    again.
    """
    failed = {r["step"] for r in records if r.get(PASSED_METRIC) == 0}
    heat, checks = _Heat(sorted(step.rollout_id for step in audit.steps)), {}
    for step in audit.steps:
        heat.add(step)
        checks[step.rollout_id] = _check(step, step.passed and step.rollout_id not in failed)
    if checks or any(r.get(PASSED_METRIC) is not None for r in records):
        for record in records:
            verdict = FAILED if record.get(PASSED_METRIC) == 0 else NO_EVIDENCE
            checks.setdefault(record["step"], StepCheck(record["step"], verdict))
    return heat.map(), [checks[step] for step in sorted(checks)]


def _check(step: AuditedStep, passed: bool) -> StepCheck:
    counts = step.counts
    return StepCheck(
        step.rollout_id,
        PASSED if passed else FAILED,
        counts["num_calls"],
        counts["num_calls_expected"],
        counts["rows_replayed"],
        counts["rows_replayed"] + counts["rows_filled"] + counts["rows_native"],
    )


def columns_of(steps: Sequence[int]) -> list[Sequence[int]]:
    """Steps in order as at most 120 columns, each of as many but the last."""
    width = max(1, -(-len(steps) // MAX_COLUMNS))
    return [steps[i : i + width] for i in range(0, len(steps), width)]


class _Heat:
    """Sums of the old-log-prob pass by layer and column."""

    def __init__(self, judged_steps: Sequence[int]):
        self._columns = columns_of(judged_steps)
        self._column_of = {step: i for i, steps in enumerate(self._columns) for step in steps}
        self._sums: dict[tuple[int, int], list[int]] = {}
        self._chance: float | None = None

    def add(self, step: AuditedStep) -> None:
        chance = step.agreement.get("chance_equal")
        if chance is not None and 0 <= chance < 1:  # what is above has no scale up to all rows
            self._chance = chance
        for layer, (equal, replayed) in step.layers.items():
            cell = self._sums.setdefault((layer, self._column_of[step.rollout_id]), [0, 0])
            cell[0] += equal
            cell[1] += replayed

    def map(self) -> HeatMap | None:
        layers = sorted({layer for layer, _ in self._sums})
        if not layers:
            return None
        count = len(self._columns)
        values = [[self._share(layer, c) for c in range(count)] for layer in layers]
        return HeatMap(layers, [(c[0], c[-1]) for c in self._columns], values, self._chance)

    def _share(self, layer: int, column: int) -> float | None:
        equal, rows = self._sums.get((layer, column), (0, 0))
        return equal / rows if rows else None

"""What a report shows of a run's evidence: agreement by layer and step, and a verdict a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3train.proof.audit_read import EvidenceFiles, StepEvidence
from r3train.proof.audit_result import FAILED, NO_EVIDENCE, PASSED, Audit
from r3train.proof.check import COUNTERS, STAGES
from r3train.observe.report_metrics import PASSED as PASSED_METRIC

_COLUMN = {name: i for i, name in enumerate(COUNTERS)}
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
    run_dir: Path, audit: Audit, records: Sequence[dict[str, Any]]
) -> tuple[HeatMap | None, list[StepCheck]]:
    """The heat map, and a verdict for every step that was trained; [] where no check was on.

    records: the run's metrics.  A step that they or the run's own verdict call failed is none that
    passed, whatever is left of its records; nor is one that failed before a later start trained it
    again.
    """
    files = EvidenceFiles(run_dir)
    at_fault = {finding.step for finding in audit.findings}
    at_fault |= {r["step"] for r in records if r.get(PASSED_METRIC) == 0}
    heat, checks = _Heat(files.judged_steps), {}
    for step in files.steps():
        heat.add(step)
        checks[step.step] = _check(step, step.step in at_fault)
    if checks or any(r.get(PASSED_METRIC) is not None for r in records):
        for record in records:
            verdict = FAILED if record.get(PASSED_METRIC) == 0 else NO_EVIDENCE
            checks.setdefault(record["step"], StepCheck(record["step"], verdict))
    return heat.map(), [checks[step] for step in sorted(checks)]


def _check(step: StepEvidence, at_fault: bool) -> StepCheck:
    def total(*names: str) -> int:
        return sum(values[_COLUMN[name]] for values in step.cells.values() for name in names)

    stages = [of for stages in step.line["expected_calls"].values() for of in stages.values()]
    expected = sum(calls for of in stages for calls in of.values())
    calls = total("num_calls")
    # a finding about several steps names the first of them: the calls tell of the others
    failed = at_fault or not step.line["passed"] or calls != expected
    return StepCheck(
        step.step,
        FAILED if failed else PASSED,
        calls,
        expected,
        total("rows_replayed"),
        total("rows_replayed", "rows_filled", "rows_native"),
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

    def add(self, step: StepEvidence) -> None:
        chance = step.line["agreement"].get("chance_equal")
        if chance is not None and 0 <= chance < 1:  # what is above has no scale up to all rows
            self._chance = chance
        for (replay_pass, stage, layer), values in step.cells.items():
            if replay_pass == "old_log_prob" and stage == STAGES[0]:
                cell = self._sums.setdefault((layer, self._column_of[step.step]), [0, 0])
                cell[0] += values[_COLUMN["rows_equal"]]
                cell[1] += values[_COLUMN["rows_replayed"]]

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

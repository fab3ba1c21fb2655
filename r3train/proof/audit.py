"""Does a run's own evidence prove R3?  Judged again from the records, not taken from the verdicts.

Three claims, kept apart (applied, covered, agreement), and three outcomes: passed, failed with what
and where, and no evidence, which is never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from r3train.proof.audit_agreement import beaten_by, CONTROLS, NATIVE
from r3train.proof.audit_files import judge_files, TrainedSteps, why_nothing
from r3train.proof.audit_read import Cell, EvidenceFiles, StepEvidence
from r3train.proof.audit_result import (
    Audit,
    FAILED,
    Finding,
    MAX_FINDINGS,
    PASSED,
    ranges,
)
from r3train.proof.audit_step import expectation_of, StepJudge
from r3train.proof.check import COUNTERS, StepExpectation
from r3train.observe.run_files import read_config, section

_SHARES = ("rows_equal", "rows_overlap", "rows_mismatch", *CONTROLS)


def audit_run(
    run_dir: Path,
    *,
    threshold: float | None = None,
    min_steps: int = 0,
    accept_superseded: bool = False,
) -> Audit:
    """Judge a run directory.

    threshold: share of rows without a common expert that may be; None takes what the run recorded,
    and what the run itself said of it.  min_steps: fewer judged steps fail.  accept_superseded: a
    failure at a step that a later start trained again becomes a note.
    Raises ValueError where ``run_dir`` is no directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    audit = Audit(str(run_dir))
    config, steps = read_config(run_dir, []), TrainedSteps(run_dir)
    files = EvidenceFiles(run_dir)
    if not files.rank_files and not files.judged_steps:
        audit.reason = why_nothing(run_dir, config, steps)
        return audit
    sums = _Sums()
    accepted = _Accepted()
    for step in files.steps(superseded=True):
        accepts = step.superseded and accept_superseded
        judge = StepJudge(step, accepted.add if accepts else audit.find, threshold)
        _judge_step(files, sums, step, judge)
    judge_files(audit, files, steps, world_size=sums.world_size, silent=sums.silent)
    _judge_run(audit, sums, min_steps)
    audit.notes += _notes(files, sums, config, threshold) + accepted.notes()
    audit.numbers = _numbers(files, sums)
    _conclude(audit, files, sums, why_nothing(run_dir, config, steps))
    return audit


@dataclass
class _Sums:
    """Sums over the steps that count, and which steps are to be told of."""

    table: dict[Cell, np.ndarray] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    # rank -> steps without a record of it while calls were missing
    silent: dict[int, list[int]] = field(default_factory=dict)
    calls_of_rank: dict[int, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    calls_expected: int = 0
    rows_expected: int = 0
    world_size: int = 0
    thresholds: set[float] = field(default_factory=set)
    shapes: set[tuple[int, int]] = field(default_factory=set)  # (experts, top-k)
    waived: set[int] = field(default_factory=set)  # steps that failed the run's threshold alone
    lost: set[int] = field(default_factory=set)  # superseded steps of which records are missing
    # layers in which a control beat a step's agreement
    beaten: set[int] = field(default_factory=set)
    start: str = ""  # the last one
    callers: set[int] = field(default_factory=set)  # ranks with calls in it
    failed: set[int] = field(default_factory=set)  # steps, by the run's own verdict
    failed_before: set[int] = field(default_factory=set)  # the same, superseded

    def add(self, step: StepEvidence, expectation: StepExpectation) -> None:
        line = step.line
        self.steps.append(step.step)
        if step.attempt != self.start:
            self.start, self.callers = step.attempt, set()
        self.world_size = max(self.world_size, line["world_size"])
        self.shapes.add((line["num_experts"], line["topk"]))
        self.calls_expected += sum(
            c for s in expectation.num_calls.values() for of in s.values() for c in of.values()
        )
        self.rows_expected += sum(expectation.rows_replayed.values())
        for cell, values in step.cells.items():
            # Python's integers: the sums of a long run of damaged records may pass 64 bits
            whole = np.array([v if i != 1 else 0 for i, v in enumerate(values)], dtype=object)
            self.table[cell] = self.table.get(cell, 0) + whole
            for rank, (calls, _) in step.of_rank[cell].items():
                self.calls_of_rank[rank] = self.calls_of_rank.get(rank, 0) + calls
                self.callers.add(rank)
        for name, value in line["agreement"].items():
            if name.startswith("chance_"):
                self.chance[name] = value

    def native(self) -> dict[int, dict[str, int]]:
        """Counters by name of each layer, where the trainer's own choice is compared."""
        return {
            layer: dict(zip(COUNTERS, values.tolist()))
            for (*place, layer), values in sorted(self.table.items())
            if tuple(place) == NATIVE
        }


class _Accepted:
    """Failures of superseded steps that the caller accepts."""

    def __init__(self) -> None:
        self._first: list[Finding] = []
        self._count = 0

    def add(self, finding: Finding) -> None:
        self._count += 1
        if len(self._first) < MAX_FINDINGS:
            self._first.append(finding)

    def notes(self) -> list[str]:
        notes = [f"accepted, of a step that was trained again: {f}" for f in self._first]
        more = self._count - len(self._first)
        return notes + [f"accepted: {more} more of them"] * bool(more)


def _judge_step(files: EvidenceFiles, sums: _Sums, step: StepEvidence, judge: StepJudge) -> None:
    expectation = expectation_of(step)
    judge.judge(expectation, lambda: _silent_ranks(files, step))
    if judge.waived:
        sums.waived.add(step.step)
    if not step.line["passed"]:
        (sums.failed_before if step.superseded else sums.failed).add(step.step)
    if step.superseded:
        if judge.lost:
            sums.lost.add(step.step)
        return
    sums.add(step, expectation)
    sums.beaten |= judge.beaten
    sums.thresholds.add(judge.threshold)
    for rank in judge.silent:
        sums.silent.setdefault(rank, []).append(step.step)


def _silent_ranks(files: EvidenceFiles, step: StepEvidence) -> list[int]:
    """Who could have made the calls that are missing: ranks without a record of this step.

    A rank whose file has not one record may hold no layer with experts: it is named only where no
    other rank is silent.
    """
    silent = [rank for rank in range(step.line["world_size"]) if rank not in step.ranks]
    known = [rank for rank in silent if rank in files.speakers or rank not in files.rank_files]
    return known or silent


def _judge_run(audit: Audit, sums: _Sums, min_steps: int) -> None:
    """What only all steps together show."""
    for layer, values in sums.native().items():
        # steps of few rows can each be too short to tell
        if layer not in sums.beaten and (beaten := beaten_by(values)):
            what, got, expected = beaten.words()
            what = f"over steps {ranges(sums.steps)}, {what}"
            place = {"replay_pass": NATIVE[0], "stage": NATIVE[1], "layer_number": layer}
            audit.find(Finding("agreement", what, **place, got=got, expected=expected))
    if 0 < len(sums.steps) < min_steps:
        got, expected = str(len(sums.steps)), f"{min_steps} at least"
        audit.find(Finding("covered", "steps with evidence", got=got, expected=expected))


def _notes(
    files: EvidenceFiles, sums: _Sums, config: dict[str, Any], threshold: float | None
) -> list[str]:
    notes = []
    if files.superseded:
        steps = ranges({step for _, step in files.superseded})
        notes.append(
            f"{len(files.attempts)} starts in one directory: steps {steps} were trained again, and"
            " the latest time counts"
        )
    if sums.lost:
        notes.append(
            f"records are missing of the first time that steps {ranges(sums.lost)} were trained"
        )
    if sums.waived:
        notes.append(
            f"by its own threshold the run judged that steps {ranges(sums.waived)} failed;"
            f" {threshold:g} is judged by in its place"
        )
    planned = section(config, "rollout").get("num_rollout")
    if type(planned) is int and 0 < len(sums.steps) < planned:
        notes.append(f"{len(sums.steps)} of the {planned} steps of the configuration")
    return notes


def _numbers(files: EvidenceFiles, sums: _Sums) -> dict[str, Any]:
    total = sum(sums.table.values(), np.zeros(len(COUNTERS), dtype=object))
    counts = dict(zip(COUNTERS, total.tolist()))
    del counts["fingerprint"]
    experts, topk = next(iter(sums.shapes)) if len(sums.shapes) == 1 else (None, None)
    return {
        "steps": len(sums.steps),
        "first_step": min(files.judged_steps, default=None),
        "last_step": max(files.judged_steps, default=None),
        "ranks": len(files.rank_files),
        "calling_ranks": sorted(sums.callers),  # of the last start
        "calls_of_rank": dict(sorted(sums.calls_of_rank.items())),
        "world_size": sums.world_size or None,
        "num_experts": experts,
        "topk": topk,
        "starts": len(files.attempts),
        # steps, of which the time that counts did not fail
        "superseded_failures": sorted(sums.failed_before - sums.failed),
        "records": files.num_records,
        "calls_expected": sums.calls_expected,
        "mismatch_threshold": max(sums.thresholds, default=None),
        **counts,
    }


def _conclude(audit: Audit, files: EvidenceFiles, sums: _Sums, why_nothing_judged: str) -> None:
    _agreement(audit, sums)
    if audit.num_findings:
        audit.verdict = FAILED
    elif not files.judged_steps:
        audit.reason = why_nothing_judged
    elif not sums.rows_expected:
        audit.reason = "not one row with recorded routes: there was nothing to replay"
    else:
        audit.verdict = PASSED
    for claim, value in audit.claims.items():
        if value != FAILED and sums.rows_expected and audit.numbers["rows_replayed"]:
            audit.claims[claim] = PASSED


def _agreement(audit: Audit, sums: _Sums) -> None:
    """Shares over the run, in the old-log-prob pass, beside chance and the misaligned controls."""
    layers = sums.native()
    rows = sum(values["rows_replayed"] for values in layers.values())
    if not rows:
        return
    for name in _SHARES:
        share = sum(values[name] for values in layers.values()) / rows
        audit.agreement[name.removeprefix("rows_")] = share
    audit.agreement.update(sums.chance)
    for layer, values in layers.items():
        if values["rows_replayed"]:
            audit.layer_agreement[layer] = values["rows_equal"] / values["rows_replayed"]
    control = max(audit.agreement[name] for name in CONTROLS)
    if audit.agreement["equal"] <= control and audit.claims["agreement"] != FAILED:
        audit.notes.append(
            f"the trainer's own choice agrees with {audit.agreement['equal']:.1%} of the rows, and"
            f" with {control:.1%} under a deliberate misalignment: are weights and alignment right?"
        )

"""The two R3 line shapes in plain log files: did replay run, and how far did the choices differ?

Lines hold no fingerprints, so they can show that replay ran and that choices did not drift apart,
not that every expert was right; the audit says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any

from r3train.evidence.audit_log_lines import (
    CheckLine,
    DamagedLine,
    ErrorLine,
    log_lines,
    WrapperLine,
)
from r3train.evidence.audit_result import Audit, FAILED, Finding, PASSED, ranges
from r3train.evidence.audit_shapes import expert_id_sums
from r3train.evidence.check import STAGES

_MAX_ERRORS = 20
# of a model that nobody described: as many as any call's rows
_MANY_EXPERTS = 1 << 40


@dataclass
class _Lines:
    """Sums over the lines of one rank and stage."""

    wrappers: int = 0
    wrapped_rows: int = 0
    checks: int = 0
    rows: int = 0
    mismatch: int = 0
    worst: tuple[float, int, int] = (0.0, 0, 0)  # share beyond noise, mismatch, rows
    odd_sums: int = 0  # calls whose expert ids cannot be those of distinct experts
    odd_sum: tuple[str, str] | None = None  # the first: got, expected


@dataclass
class _Seen:
    """What the log files hold."""

    lines: dict[tuple[int, str], _Lines] = field(default_factory=dict)
    topks: set[int] = field(default_factory=set)  # the first 20
    errors: list[str] = field(default_factory=list)
    threshold_errors: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    num_damaged: int = 0
    cut: list[str] = field(default_factory=list)

    def of(self, rank: int, stage: str) -> _Lines:
        return self.lines.setdefault((rank, stage), _Lines())

    def num_calls(self, rank: int, stage: str) -> int:
        return self.lines.get((rank, stage), _Lines()).wrappers

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in self.lines}


def audit_logs(
    files: Sequence[Path],
    *,
    threshold: float = 1e-2,
    run: Mapping[str, Any] | None = None,
    threshold_replaced: bool = False,
) -> Audit:
    """Judge log files by their R3 lines, streaming.

    Every branch line needs its check line; the share of mismatching rows may not exceed
    ``threshold``, over a rank and stage and, but for counting noise, in one call.
    run: numbers of the audit of the same run's evidence, which says what ranks and calls there
    must be.  threshold_replaced: what the run itself said by its own threshold does not count.
    Raises ValueError where a file cannot be read.
    """
    audit = Audit(", ".join(map(str, files)))
    run = run or {}
    topk, num_experts = run.get("topk"), run.get("num_experts")
    seen = _Seen()
    for path in files:
        try:
            _read(Path(path), seen, threshold, num_experts or _MANY_EXPERTS)
        except OSError as error:
            raise ValueError(f"{path}: cannot read: {error.strerror}") from None
    rows = sum(s.rows for s in seen.lines.values())
    for (rank, stage), lines in sorted(seen.lines.items()):
        _judge(audit, rank, stage, lines, threshold, some_rows=rows > 0)
    _judge_text(audit, seen, threshold_replaced)
    _judge_topk(audit, seen, topk)
    known = set(run.get("calling_ranks", ()))
    if known:
        _judge_against(audit, seen, known, run)
    else:
        _judge_ranks(audit, seen)
    audit.numbers = {
        "ranks": len(seen.ranks),
        "num_calls": sum(s.wrappers for s in seen.lines.values()),
        "checks": sum(s.checks for s in seen.lines.values()),
        "rows_mismatch": sum(s.mismatch for s in seen.lines.values()),
        "rows_checked": rows,
        "mismatch_threshold": threshold,
    }
    _conclude(audit, seen, known=bool(known))
    return audit


def _read(path: Path, seen: _Seen, threshold: float, num_experts: int) -> None:
    for line in log_lines(path):
        match line:
            case WrapperLine(rank, stage, num_rows, topk, idx_sum):
                lines = seen.of(rank, stage)
                lines.wrappers += 1
                lines.wrapped_rows += num_rows
                if len(seen.topks) < _MAX_ERRORS:
                    seen.topks.add(topk)
                low, high = expert_id_sums(num_rows, topk, num_experts)
                if not low <= idx_sum <= high:
                    lines.odd_sums += 1
                    most = f"to {high}" if num_experts < _MANY_EXPERTS else "on"
                    lines.odd_sum = lines.odd_sum or (str(idx_sum), f"from {low} {most}")
            case CheckLine(rank, stage, num_rows, mismatch):
                lines = seen.of(rank, stage)
                lines.checks += 1
                lines.rows += num_rows
                lines.mismatch += mismatch
                allowed = threshold * num_rows
                # a call of a few rows passes a share by chance: five standard deviations do not
                excess = mismatch - allowed - 5 * sqrt(allowed) - 2
                lines.worst = max(lines.worst, (excess, mismatch, num_rows))
            case ErrorLine(text, of_threshold):
                kept = seen.threshold_errors if of_threshold else seen.errors
                if len(kept) < _MAX_ERRORS and text not in kept:
                    kept.append(text)
            case DamagedLine(text, cut=True):
                seen.cut.append(f"{path} ends within a line: {text}")
            case DamagedLine(text):
                seen.num_damaged += 1
                if len(seen.damaged) < _MAX_ERRORS:
                    seen.damaged.append(f"{path}: a damaged line: {text}")


def _judge(
    audit: Audit, rank: int, stage: str, lines: _Lines, threshold: float, *, some_rows: bool
) -> None:
    def found(claim: str, what: str, got: object, expected: object) -> None:
        place = {"ranks": (rank,), "replay_pass": "any pass", "stage": stage}
        audit.find(Finding(claim, what, **place, got=str(got), expected=str(expected)))

    if lines.checks != lines.wrappers:
        found("covered", "R3 check lines", lines.checks, f"{lines.wrappers} (R3 wrapper lines)")
    elif lines.rows != lines.wrapped_rows:
        found("covered", "rows in R3 check lines", lines.rows, lines.wrapped_rows)
    elif some_rows and not lines.rows:
        found("covered", "rows in R3 check lines", 0, "some, as in other lines")
    if lines.odd_sum:
        what = f"replay_idx_sum of {lines.odd_sums} calls, which their experts cannot add up to,"
        found("covered", what, *lines.odd_sum)
    if lines.mismatch > threshold * lines.rows:
        got, most = f"{lines.mismatch} of {lines.rows}", f"at most {threshold:g} of them"
        found("agreement", "mismatching rows", got, most)
    elif lines.worst[0] > 0:
        got, most = f"{lines.worst[1]} of {lines.worst[2]}", f"at most {threshold:g} of them"
        found("agreement", "mismatching rows in the worst call", got, most)


def _judge_text(audit: Audit, seen: _Seen, threshold_replaced: bool) -> None:
    for text in seen.errors:
        audit.find(Finding("applied", f"the log says: {text}"))
    for text in seen.threshold_errors:
        if threshold_replaced:
            audit.notes.append(f"the log says, by the threshold of the run: {text}")
        else:
            audit.find(Finding("agreement", f"the log says: {text}"))
    for text in seen.damaged:
        audit.find(Finding("covered", text))
    if more := seen.num_damaged - len(seen.damaged):
        audit.find(Finding("covered", f"{more} more damaged lines"), count=more)
    audit.notes += seen.cut


def _judge_topk(audit: Audit, seen: _Seen, topk: int | None) -> None:
    if topk is not None and seen.topks - {topk}:
        got = ", ".join(map(str, sorted(seen.topks - {topk})))
        audit.find(Finding("covered", "topk of some calls", got=got, expected=str(topk)))
    elif len(seen.topks) > 1:
        got = ", ".join(map(str, sorted(seen.topks)))
        audit.find(Finding("covered", "topk of the calls", got=got, expected="one number"))


def _judge_against(audit: Audit, seen: _Seen, known: set[int], run: Mapping[str, Any]) -> None:
    """Ranks and calls against those of the run's own evidence."""
    if not seen.ranks:
        return
    for rank in sorted(known - seen.ranks):
        text = "no R3 line in the log files, and calls in the run's evidence"
        audit.find(Finding("covered", text, ranks=(rank,)))
    if run["starts"] != 1:
        return  # the log files may be of one start alone
    for rank, calls in run["calls_of_rank"].items():
        got = sum(seen.num_calls(rank, stage) for stage in STAGES)
        # more may be of a step that was not finished
        if 0 < got < calls:
            expected = f"{calls}, as in the run's evidence"
            text = "R3 wrapper lines"
            audit.find(Finding("covered", text, ranks=(rank,), got=str(got), expected=expected))


def _judge_ranks(audit: Audit, seen: _Seen) -> None:
    """Ranks and calls against one another: nothing else says which there were."""
    missing = set(range(max(seen.ranks, default=-1))) - seen.ranks
    if missing:
        text = (
            "no R3 line in the log files, and lines of a higher rank (a rank without layers with"
            " experts has none: judge beside RUN_DIR, which knows)"
        )
        audit.find(Finding("covered", text, ranks=tuple(sorted(missing))))
        return
    places = [_calls_of(seen, rank) for rank in sorted(seen.ranks)]
    calls = [forward + backward for forward, backward, _ in places]
    if len({place[:2] for place in places}) <= 1:
        return
    few, most = min(calls), max(calls)
    who = f"{few} on rank {calls.index(few)}, {most} on rank {calls.index(most)}"
    if width := _stage_width(places):
        audit.notes.append(
            f"router calls differ between ranks ({who}), as they do between pipeline stages of"
            f" {width} rank{'s' * (width != 1)} with unequal numbers of layers"
        )
    else:
        text = "router calls, which differ as between no pipeline stages,"
        odd = tuple(rank for rank, n in enumerate(calls) if n < most)
        audit.find(Finding("covered", text, ranks=odd, got=who, expected="as many on each rank"))


def _calls_of(seen: _Seen, rank: int) -> tuple[int, int, Fraction]:
    """Calls of a rank, forward and recomputed, and the rows of a forward call on average."""
    calls, recomputed = (seen.num_calls(rank, stage) for stage in STAGES)
    rows = seen.lines[rank, STAGES[0]].wrapped_rows if calls else 0
    return calls, recomputed, Fraction(rows, max(1, calls))


def _stage_width(places: Sequence[tuple[int, int, Fraction]]) -> int | None:
    """Ranks of a pipeline stage, were the differences those of stages; None where they are not.

    Megatron numbers the ranks stage by stage.  Ranks of one stage hold the same layers and run the
    same number of microbatches, so their calls are equal; ranks at the same place of two stages
    see the same microbatches, so their calls have the same number of rows on average.
    """
    world = len(places)
    for width in range(world // 2, 0, -1):
        if world % width == 0 and all(
            calls[:2] == places[rank - rank % width][:2] and calls[2] == places[rank % width][2]
            for rank, calls in enumerate(places)
        ):
            return width
    return None


def _conclude(audit: Audit, seen: _Seen, *, known: bool) -> None:
    n = audit.numbers
    if audit.num_findings:
        audit.verdict = FAILED
    elif not n["checks"]:
        audit.reason = "no R3 line in the log files"
    elif not n["rows_checked"]:
        audit.reason = f"{n['checks']} R3 check lines in the log files, and not one row in them"
    else:
        audit.verdict = PASSED
        audit.notes.append(
            "log lines show that replay ran and how far choices differ; only evidence/ shows that"
            " every expert was the rollout's"
        )
        if not known:
            shown = f"rank{'s' * (len(seen.ranks) != 1)} {ranges(seen.ranks)}"
            audit.notes.append(
                f"the lines are of {shown}; whether there were more ranks is known only beside a"
                " RUN_DIR with evidence"
            )
    for claim in ("covered", "agreement"):
        if n["rows_checked"] and audit.claims[claim] != FAILED:
            audit.claims[claim] = PASSED

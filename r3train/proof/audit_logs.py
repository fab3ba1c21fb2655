"""The two R3 line shapes in plain log files: did replay run, and how far did the choices differ?

Lines hold no fingerprints, so they can show that replay ran and that choices did not drift apart,
not that every expert was right; the audit says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from r3train.proof.audit_log_lines import (
    CheckLine,
    DamagedLine,
    ErrorLine,
    log_lines,
    StartLine,
    WrapperLine,
)
from r3train.proof.audit_result import Audit, FAILED, Finding, PASSED, ranges
from r3train.proof.audit_shapes import expert_id_sums
from r3train.proof.check import STAGES

_MAX_ERRORS = 20
# of a model that nobody described: as many as any call's rows
_MANY_EXPERTS = 1 << 40


@dataclass
class _Lines:
    """Sums over the lines of one rank and stage.

    A kill, and a log that is rotated, may part the two lines of a call: ``ends`` counts wrapper lines
    that are the last of a file or of a start, ``leads`` check lines that are the first of one.
    """

    wrappers: int = 0
    wrapped_rows: int = 0
    checks: int = 0
    rows: int = 0
    mismatch: int = 0
    worst: tuple[float, int, int] = (0.0, 0, 0)  # share beyond noise, mismatch, rows
    odd_sums: int = 0  # calls whose expert ids cannot be those of distinct experts
    odd_sum: tuple[str, str] | None = None  # the first: got, expected
    ends: int = 0
    leads: int = 0
    apart: int = 0  # rows of check lines beyond those of the wrapper lines before them
    _pending: int | None = None  # rows of a wrapper line whose check line is to come
    _first: bool = True

    def wrapper(self, num_rows: int) -> None:
        self.wrappers += 1
        self.wrapped_rows += num_rows
        self._pending, self._first = num_rows, False

    def check(self, num_rows: int, mismatch: int) -> None:
        self.checks += 1
        self.rows += num_rows
        self.mismatch += mismatch
        if self._pending is None:
            self.leads += self._first
        else:
            self.apart += num_rows - self._pending
        self._pending, self._first = None, False

    def end(self) -> None:
        """The file ends here, or a start does."""
        self.ends += self._pending is not None
        self._pending, self._first = None, True

    @property
    def calls(self) -> int:
        return max(self.wrappers, self.checks)

    @property
    def lost(self) -> int:
        """Check lines that are missing within a text that goes on."""
        return self.wrappers - self.checks - self.ends + self.leads


@dataclass
class _Texts:
    """What is to be told, in words: the first 20, and how many there are."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, text: str, *, once: bool = False) -> None:
        self.count += 1
        if len(self.first) < _MAX_ERRORS and not (once and text in self.first):
            self.first.append(text)

    @property
    def more(self) -> int:
        return self.count - len(self.first)


@dataclass
class _Seen:
    """What the log files hold."""

    lines: dict[tuple[int, str], _Lines] = field(default_factory=dict)
    topks: set[int] = field(default_factory=set)  # the first 20
    errors: _Texts = field(default_factory=_Texts)
    threshold_errors: _Texts = field(default_factory=_Texts)
    accepted: _Texts = field(default_factory=_Texts)
    damaged: _Texts = field(default_factory=_Texts)
    cut: _Texts = field(default_factory=_Texts)

    def of(self, rank: int, stage: str) -> _Lines:
        return self.lines.setdefault((rank, stage), _Lines())

    def end(self, rank: int | None = None) -> None:
        """A file ends, or a start of the rank; None: of all ranks."""
        for (of_rank, _), lines in self.lines.items():
            if rank in (None, of_rank):
                lines.end()

    def in_stage(self, stage: str) -> dict[int, _Lines]:
        """The lines of every rank; none where it has none of the stage."""
        return {rank: self.lines.get((rank, stage), _Lines()) for rank in sorted(self.ranks)}

    def calls_of(self, rank: int) -> int:
        return sum(self.lines.get((rank, stage), _Lines()).calls for stage in STAGES)

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in self.lines}


def audit_logs(
    files: Sequence[Path],
    *,
    threshold: float = 1e-2,
    run: Mapping[str, Any] | None = None,
    threshold_replaced: bool = False,
    accepted_steps: Collection[int] = (),
) -> Audit:
    """Judge log files by their R3 lines, streaming.

    Every branch line needs its check line, but where a kill or the end of a file parts them; the
    share of mismatching rows may not exceed ``threshold``, over all ranks as the run judges.
    run: numbers of the audit of the same run's evidence, which says what ranks and calls there
    must be, and has judged each layer.  Without it a call by itself may not exceed the threshold but
    for counting noise, and lines that may not be all there are no evidence.
    threshold_replaced: what the run itself said by its own threshold does not count.
    accepted_steps: failed, and trained again by a later start: what the log says of them is a note.
    Raises ValueError where a file cannot be read.
    """
    audit = Audit(", ".join(map(str, files)))
    run, seen = run or {}, _Seen()
    num_experts = run.get("num_experts") or _MANY_EXPERTS
    for path in files:
        try:
            _read(Path(path), seen, threshold, num_experts, accepted_steps)
        except OSError as error:
            raise ValueError(f"{path}: cannot read: {error.strerror}") from None
        seen.end()
    known = set(run.get("calling_ranks", ()))
    rows = sum(s.rows for s in seen.lines.values())
    _judge_lines(audit, seen, some_rows=rows > 0)
    for stage in STAGES:
        of_rank, accepts = seen.in_stage(stage), bool(accepted_steps)
        _judge_shares(audit, stage, of_rank, threshold, known=bool(known), accepts=accepts)
    _judge_text(audit, seen, threshold_replaced)
    _judge_topk(audit, seen, run.get("topk"))
    unknown = "" if known else _what_is_unknown(seen)
    if known:
        _judge_against(audit, seen, known, run)
    audit.numbers = {
        "ranks": len(seen.ranks),
        "num_calls": sum(s.wrappers for s in seen.lines.values()),
        "checks": sum(s.checks for s in seen.lines.values()),
        "rows_mismatch": sum(s.mismatch for s in seen.lines.values()),
        "rows_checked": rows,
        "mismatch_threshold": threshold,
    }
    _conclude(audit, seen, unknown, known=bool(known))
    return audit


def _read(
    path: Path, seen: _Seen, threshold: float, num_experts: int, accepted_steps: Collection[int]
) -> None:
    for line in log_lines(path):
        match line:
            case WrapperLine(rank, stage, num_rows, topk, idx_sum):
                lines = seen.of(rank, stage)
                lines.wrapper(num_rows)
                if len(seen.topks) < _MAX_ERRORS:
                    seen.topks.add(topk)
                low, high = expert_id_sums(num_rows, topk, num_experts)
                if not low <= idx_sum <= high:
                    lines.odd_sums += 1
                    most = f"to {high}" if num_experts < _MANY_EXPERTS else "on"
                    lines.odd_sum = lines.odd_sum or (str(idx_sum), f"from {low} {most}")
            case CheckLine(rank, stage, num_rows, mismatch):
                lines = seen.of(rank, stage)
                lines.check(num_rows, mismatch)
                allowed = threshold * num_rows
                # a call of a few rows passes a share by chance: five standard deviations do not
                excess = mismatch - allowed - 5 * sqrt(allowed) - 2
                lines.worst = max(lines.worst, (excess, mismatch, num_rows))
            case StartLine(rank):
                seen.end(rank)
            case ErrorLine(text, of_threshold, step):
                errors = seen.threshold_errors if of_threshold else seen.errors
                (seen.accepted if step in accepted_steps else errors).add(text, once=True)
            case DamagedLine(text, cut=True):
                seen.cut.add(f"{path} ends within a line, or a start in it does: {text}")
                seen.end()
            case DamagedLine(text):
                seen.damaged.add(f"{path}: a damaged line: {text}")


def _judge_lines(audit: Audit, seen: _Seen, *, some_rows: bool) -> None:
    """The lines of each rank and stage by themselves."""
    parted = set()
    for (rank, stage), lines in sorted(seen.lines.items()):
        place = {"ranks": (rank,), "replay_pass": "any pass", "stage": stage}

        def found(what: str, got: object, expected: object) -> None:
            audit.find(Finding("covered", what, **place, got=str(got), expected=str(expected)))

        if lines.lost:
            found("R3 check lines", lines.checks, f"{lines.wrappers} (R3 wrapper lines)")
        elif lines.apart and lines.rows != lines.wrapped_rows:
            found("rows in R3 check lines", lines.rows, lines.wrapped_rows)
        elif some_rows and lines.checks and not lines.rows:
            found("rows in R3 check lines", 0, "some, as in other lines")
        elif lines.checks != lines.wrappers:
            parted.add(rank)
        if lines.odd_sum:
            what = (
                f"replay_idx_sum of {lines.odd_sums} calls, which their experts cannot add up to,"
            )
            found(what, *lines.odd_sum)
    if parted:
        audit.notes.append(
            f"a call of rank{'s' * (len(parted) > 1)} {ranges(parted)} has one of its two lines:"
            " its writer was stopped between them, or the log was cut there"
        )


def _judge_shares(
    audit: Audit,
    stage: str,
    of_rank: Mapping[int, _Lines],
    threshold: float,
    *,
    known: bool,
    accepts: bool,
) -> None:
    """Mismatching rows of a stage: over all ranks, and in one call where nobody judged the layers."""

    def above(what: str, ranks: tuple[int, ...], mismatch: int, rows: int) -> Finding:
        got, most = f"{mismatch} of {rows}", f"at most {threshold:g} of them"
        return Finding("agreement", what, None, ranks, "any pass", stage, None, got, most)

    mismatch = sum(lines.mismatch for lines in of_rank.values())
    rows = sum(lines.rows for lines in of_rank.values())
    if mismatch > threshold * rows:
        ranks = tuple(r for r, s in of_rank.items() if s.mismatch > threshold * s.rows)
        finding = above("mismatching rows", ranks, mismatch, rows)
        if accepts:
            text = f"accepted, with lines of steps that were trained again: {finding}"
            audit.notes.append(text)
        else:
            audit.find(finding)
    elif not known:
        for rank, lines in of_rank.items():
            excess, mismatch, rows = lines.worst
            if excess > 0:
                what = "mismatching rows in the worst call"
                audit.find(above(what, (rank,), mismatch, rows))


def _judge_text(audit: Audit, seen: _Seen, threshold_replaced: bool) -> None:
    for text in seen.accepted.first:
        audit.notes.append(f"accepted, of a step that was trained again: the log says: {text}")
    for text in seen.errors.first:
        audit.find(Finding("applied", f"the log says: {text}"))
    for text in seen.threshold_errors.first:
        if threshold_replaced:
            audit.notes.append(f"the log says, by the threshold of the run: {text}")
        else:
            audit.find(Finding("agreement", f"the log says: {text}"))
    for text in seen.damaged.first:
        audit.find(Finding("covered", text))
    if more := seen.damaged.more:
        audit.find(Finding("covered", f"{more} more damaged lines"), count=more)
    audit.notes += seen.cut.first
    audit.notes += [f"{seen.cut.more} more lines that were cut"] * bool(seen.cut.more)


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
        got = seen.calls_of(rank)
        # more may be of a step that was not finished
        if 0 < got < calls:
            expected = f"{calls}, as in the run's evidence"
            text = "R3 wrapper lines"
            audit.find(Finding("covered", text, ranks=(rank,), got=str(got), expected=expected))


def _what_is_unknown(seen: _Seen) -> str:
    """Why lines alone may not be all there are; empty where nothing says so."""
    missing = set(range(max(seen.ranks, default=-1))) - seen.ranks
    if missing:
        return (
            f"no R3 line of rank{'s' * (len(missing) > 1)} {ranges(missing)} in the log files, and"
            " lines of a higher rank: a rank without layers with experts has none, and neither has"
            " one whose log is not here; judge it beside RUN_DIR, whose evidence says which ranks"
            " there are"
        )
    for stage in STAGES:
        calls = {rank: lines.calls for rank, lines in seen.in_stage(stage).items()}
        few, most = (of(calls, key=calls.get, default=0) for of in (min, max))
        if calls and calls[few] < calls[most]:
            return (
                f"router calls of {stage} differ between ranks ({calls[few]} on rank {few},"
                f" {calls[most]} on rank {most}), as between pipeline stages and where lines are"
                " lost; judge it beside RUN_DIR, whose evidence says how many calls each rank has"
            )
    return ""


def _conclude(audit: Audit, seen: _Seen, unknown: str, *, known: bool) -> None:
    n = audit.numbers
    if audit.num_findings:
        audit.verdict = FAILED
    elif not n["checks"]:
        audit.reason = "no R3 check line in the log files"
    elif not n["rows_checked"]:
        audit.reason = f"{n['checks']} R3 check lines in the log files, and not one row in them"
    elif unknown:
        audit.reason = unknown
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
        shown = n["rows_checked"] and not (claim == "covered" and unknown)
        if shown and audit.claims[claim] != FAILED:
            audit.claims[claim] = PASSED

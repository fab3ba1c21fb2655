"""The two R3 line shapes in log files, plain or compressed, of r3train or of another trainer.

Lines hold neither fingerprints nor layers: they show that replay ran and how far choices differ, not
that every expert was the rollout's.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from r3train.proof.judge import expert_id_sums, STAGES
from r3train.audit.findings import Audit, Finding, ranges

_MAX_LINE = 1 << 20  # characters that are read at once
_MAX_ERRORS = 20
_N = r"(\d{1,15})"
_STAGE = r"(replay_(?:forward|backward))"
# A line of another shape is a line that is missing.
_RECORD = re.compile(
    rf"R3 wrapper: {_STAGE} branch taken \(rank (?P<wrapper>\d{{1,6}}), n_tokens={_N}, topk={_N}, "
    rf"replay_idx_sum=(-?\d{{1,18}})\)(?:, calls={_N})?"
    rf"|R3 check \(rank (?P<check>\d{{1,6}}), stage {_STAGE}\): n_tokens={_N} mismatch={_N} \("
    rf"(?:[\d.]{{1,9}}%\)(?:, calls={_N})?)?"
    r"|R3 evidence: a start of rank (?P<start>\d{1,6})",
    re.ASCII,
)
_ERROR = re.compile(r"R3 check failed at step |(?P<threshold>AssertionError: R3 mismatch tokens )")
_STEP = re.compile(r"at step (\d{1,15})", re.ASCII)
_CANNOT_SHOW = (
    "log lines show neither fingerprints nor layers nor weight versions nor how many ranks there are: "
    "only evidence/ shows that every expert was the rollout's, and which rows are stale"
)


@dataclass
class _Calls:
    """Sums over the calls of one rank and stage; each has a wrapper line and then a check line."""

    calls: int = 0
    checks: int = 0
    rows: int = 0
    mismatch: int = 0
    parted: int = 0  # calls that lack one of their lines, or have other rows in each
    impossible: int = 0  # calls whose expert ids cannot be those of distinct experts


@dataclass
class _Lines:
    """Everything that the files say."""

    num_experts: int
    calls: defaultdict[tuple[int, str], _Calls] = field(default_factory=lambda: defaultdict(_Calls))
    topks: set[int] = field(default_factory=set)  # the first 20
    errors: dict[str, bool] = field(default_factory=dict)  # text -> by the threshold

    def read(self, file: TextIO) -> None:
        """Add the lines of a file; records may stand anywhere in them.

        A call may lack its check line at the end of the file or before the next start of its rank,
        and its wrapper line at the beginning of the file: a kill or a rotated log does that.
        """
        # rank -> stage, rows and calls of its wrapper line
        open_calls: dict[int, tuple[str, str, str | None]] = {}
        seen: set[int] = set()
        while line := file.readline(_MAX_LINE):
            for record in _RECORD.finditer(line):
                if record["start"]:
                    open_calls.pop(int(record["start"]), None)
                    continue
                rank = int(record["wrapper"] or record["check"])
                if record["wrapper"]:
                    stage, _, rows, topk, idx_sum, calls = record.groups()[:6]
                    numbers = map(int, (rows, topk, idx_sum, calls or 1))
                    self._add_wrapper(rank, stage, *numbers)
                    self.calls[rank, stage].parted += rank in open_calls
                    open_calls[rank] = (stage, rows, calls)
                else:
                    stage, rows, mismatch, calls = record.groups()[7:11]
                    opened = open_calls.pop(rank, None)
                    of = self.calls[rank, stage]
                    of.calls += int(calls or 1) if opened is None else 0
                    of.parted += rank in seen if opened is None else opened != (stage, rows, calls)
                    of.checks += 1
                    of.rows += int(rows)
                    of.mismatch += int(mismatch)
                seen.add(rank)
            for error in _ERROR.finditer(line):
                if len(self.errors) < _MAX_ERRORS:
                    text = line[error.start() : error.start() + 200].strip()
                    self.errors[text] = error["threshold"] is not None

    def _add_wrapper(
        self, rank: int, stage: str, rows: int, topk: int, idx_sum: int, calls: int
    ) -> None:
        low, high = expert_id_sums(rows, topk, self.num_experts)
        if len(self.topks) < _MAX_ERRORS:
            self.topks.add(topk)
        self.calls[rank, stage].calls += calls
        self.calls[rank, stage].impossible += not low <= idx_sum <= high


def audit_logs(
    files: Sequence[Path],
    *,
    threshold: float = 1e-2,
    run: Mapping[str, Any] | None = None,
    threshold_replaced: bool = False,
    accepted_steps: Collection[int] = (),
) -> Audit:
    """Judge log files by their R3 lines, in bounded memory.

    The share of mismatching rows, over all ranks, may not exceed ``threshold``.  Lines do not tell the
    weight versions of rows: where the run's evidence has mismatching stale rows, it alone judges.
    run: ``Audit.numbers`` of the same run's evidence: its ranks and calls must be in the lines.
    threshold_replaced: errors by the run's own threshold become notes.
    accepted_steps: errors of these steps become notes: they were trained again by a later start.
    Raises ValueError where a file cannot be read.
    """
    audit, run = Audit(", ".join(map(str, files))), run or {}
    lines = _Lines(run.get("num_experts") or 1 << 40)  # of a model that nobody described
    for path in files:
        try:
            opened = gzip.open if Path(path).suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8", errors="replace") as file:
                lines.read(file)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{path}: cannot read: {reason}") from None
    for text, by_threshold in lines.errors.items():
        step = _STEP.search(text)
        if step and int(step[1]) in accepted_steps:
            audit.notes.append(f"accepted, of a step that was trained again: the log says: {text}")
        elif by_threshold and threshold_replaced:
            audit.notes.append(f"the log says, by the threshold of the run: {text}")
        else:
            claim = "agreement" if by_threshold else "applied"
            audit.find(Finding(claim, f"the log says: {text}"))
    for finding in _wrong_calls(lines.calls):
        audit.find(finding)
    topk = run.get("topk")
    if len(lines.topks) > 1 or (topk and lines.topks - {topk}):
        expected = "one number" if topk is None else str(topk)
        got = ", ".join(map(str, sorted(lines.topks)))
        audit.find(Finding("covered", "top-k of the calls", got=got, expected=expected))
    for finding in _above_threshold(lines.calls, threshold):
        if run.get("rows_stale_mismatch"):
            audit.notes.append(
                f"not judged here: the evidence tells which rows are stale: {finding}"
            )
        elif accepted_steps:
            audit.notes.append(f"accepted, with steps that were trained again: {finding}")
        else:
            audit.find(finding)
    for finding in _missing_calls(lines.calls, run) if lines.calls else ():
        audit.find(finding)
    _conclude(audit, lines.calls, threshold, alone=not run.get("calling_ranks"))
    return audit


def _wrong_calls(calls: Mapping[tuple[int, str], _Calls]) -> list[Finding]:
    found, some_rows = [], any(of.rows for of in calls.values())
    for (rank, stage), of in sorted(calls.items()):
        place = (None, (rank,), "any pass", stage, None)
        if of.parted:
            what = "calls that lack a wrapper or a check line, or have other rows in each"
            found.append(Finding("covered", what, *place, str(of.parted), "0"))
        if of.impossible:
            what = "calls whose replay_idx_sum is impossible for distinct experts"
            found.append(Finding("covered", what, *place, str(of.impossible), "0"))
        if some_rows and not of.rows:
            found.append(Finding("covered", "rows in R3 check lines", *place, "0", "some"))
    return found


def _above_threshold(calls: Mapping[tuple[int, str], _Calls], threshold: float) -> list[Finding]:
    found = []
    for stage in STAGES:
        own = {rank: c for (rank, of), c in calls.items() if of == stage}
        mismatch, rows = sum(c.mismatch for c in own.values()), sum(c.rows for c in own.values())
        if mismatch > threshold * rows:
            ranks = tuple(sorted(r for r, c in own.items() if c.mismatch > threshold * c.rows))
            place = (None, ranks, "any pass", stage, None)
            values = (f"{mismatch} of {rows}", f"at most {threshold:g} of them")
            what = "mismatching rows, of whatever weight version,"
            found.append(Finding("agreement", what, *place, *values))
    return found


def _missing_calls(
    calls: Mapping[tuple[int, str], _Calls], run: Mapping[str, Any]
) -> list[Finding]:
    """Ranks and calls that the run's own evidence has and the lines have not."""
    got: Counter[int] = Counter()
    for (rank, _), of in calls.items():
        got[rank] += of.calls
    # of several starts the files may be of one only
    expected = run.get("calls_of_rank", {}) if run.get("starts") == 1 else {}
    found = []
    for rank in run.get("calling_ranks", ()):
        if not got[rank]:
            what = "no R3 line in the log files, though the run's evidence has calls of this rank"
            found.append(Finding("covered", what, ranks=(rank,)))
        elif got[rank] < expected.get(rank, 0):
            values = {
                "got": str(got[rank]),
                "expected": f"{expected[rank]}, as in the run's evidence",
            }
            found.append(Finding("covered", "calls in R3 lines", ranks=(rank,), **values))
    return found


def _conclude(
    audit: Audit, calls: Mapping[tuple[int, str], _Calls], threshold: float, *, alone: bool
) -> None:
    checks, rows = sum(of.checks for of in calls.values()), sum(of.rows for of in calls.values())
    audit.numbers = {
        "ranks": len({rank for rank, _ in calls}),
        "num_calls": sum(of.calls for of in calls.values()),
        "checks": checks,
        "rows_mismatch": sum(of.mismatch for of in calls.values()),
        "rows_checked": rows,
        "mismatch_threshold": threshold,
    }
    audit.notes.append(_CANNOT_SHOW)
    partial = _why_partial(calls) if alone else ""
    reason = partial
    if not checks:
        reason = "no R3 check line in the log files"
    elif not rows:
        reason = f"{checks} R3 check lines in the log files, and not one row in them"
    shown = ["agreement"] if partial else ["agreement", "covered"]
    audit.conclude(reason, shown=shown if rows else ())


def _why_partial(calls: Mapping[tuple[int, str], _Calls]) -> str:
    """The reason why lines without a run's evidence may not be all; empty where they look whole."""
    ranks = {rank for rank, _ in calls}
    missing = set(range(max(ranks, default=0))) - ranks
    counts = {stage: {calls.get((r, stage), _Calls()).calls for r in ranks} for stage in STAGES}
    if missing:
        found = f"no R3 line of rank{'s' * (len(missing) > 1)} {ranges(missing)}"
    elif any(len(of) > 1 for of in counts.values()):
        found = "router calls differ between ranks"
    else:
        return ""
    return (
        f"{found}, as pipeline stages and lost lines both cause it: judge the logs next to RUN_DIR"
    )

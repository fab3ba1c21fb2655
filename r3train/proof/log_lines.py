"""The two R3 line shapes in plain log files, of r3train or of another trainer.

Lines hold neither fingerprints nor layers: they show that replay ran and how far choices differ, not
that every expert was the rollout's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3train.proof.check import expert_id_sums, STAGES
from r3train.proof.findings import Audit, Finding, ranges

_BLOCK = 1 << 20
_LONGEST = 4096  # bytes of a record; a shape and its numbers take 150
_SHOWN = 200
_MAX_TEXTS = 20
_N = rb"(\d{1,15})"
_RANK = rb"(\d{1,6})"
_STAGE = rb"(replay_(?:forward|backward))"
# What begins as a record and goes on in another way is damaged.
_RECORD = re.compile(
    rb"R3 wrapper: " + _STAGE + rb" branch taken \(rank " + _RANK + rb", n_tokens=" + _N + rb", "
    rb"topk=" + _N + rb", replay_idx_sum=(?P<wrapper>-?\d{1,18})\)"
    rb"|R3 check \(rank " + _RANK + rb", stage " + _STAGE + rb"\): n_tokens=" + _N + rb" "
    rb"mismatch=(?P<check>\d{1,15}) \("
    rb"|R3 evidence: a start of rank (?P<start>\d{1,6})"
    rb"|(?P<failed>R3 check failed at step )"
    rb"|(?P<threshold>AssertionError: R3 mismatch tokens )"
    rb"|(?P<damaged>R3 (?:wrapper: replay_|check \(rank ))"
)
_STEP = re.compile(r"at step (\d{1,15})")
_CANNOT_SHOW = (
    "log lines show neither fingerprints nor layers nor how many ranks there are: only evidence/ shows "
    "that every expert was the rollout's"
)


@dataclass
class _Calls:
    """Sums over the lines of one rank and stage."""

    wrappers: int = 0
    wrapped_rows: int = 0
    checks: int = 0
    rows: int = 0
    mismatch: int = 0
    impossible: int = 0  # calls whose expert ids cannot be those of distinct experts

    @property
    def count(self) -> int:
        return max(self.wrappers, self.checks)


def audit_logs(
    files: Sequence[Path],
    *,
    threshold: float = 1e-2,
    run: Mapping[str, Any] | None = None,
    threshold_replaced: bool = False,
    accepted_steps: Collection[int] = (),
) -> Audit:
    """Judge log files by their R3 lines, in bounded memory.

    Every call has both lines, but for the last one of a start or of a file.  The share of mismatching
    rows, over all ranks, may not exceed ``threshold``.
    run: ``Audit.numbers`` of the same run's evidence: its ranks and calls must be in the lines.
    threshold_replaced: errors by the run's own threshold become notes.
    accepted_steps: errors of these steps become notes: they were trained again by a later start.
    Raises ValueError where a file cannot be read.
    """
    audit, run = Audit(", ".join(map(str, files))), run or {}
    reader = _Reader(audit, run.get("num_experts"), threshold_replaced, accepted_steps)
    for path in files:
        try:
            reader.read(Path(path))
        except OSError as error:
            raise ValueError(f"{path}: cannot read: {error.strerror}") from None
    calls = reader.calls
    _judge_pairs(audit, calls, len(files), reader.starts)
    for stage in STAGES:
        own = [c for (_, of), c in calls.items() if of == stage]
        mismatch, rows = sum(c.mismatch for c in own), sum(c.rows for c in own)
        if mismatch > threshold * rows:
            got, most = f"{mismatch} of {rows}", f"at most {threshold:g} of them"
            above = {
                r for (r, of), c in calls.items() if of == stage and c.mismatch > threshold * c.rows
            }
            place = (None, tuple(sorted(above)), "any pass", stage, None)
            finding = Finding("agreement", "mismatching rows", *place, got, most)
            if accepted_steps:
                audit.notes.append(f"accepted, with steps that were trained again: {finding}")
            else:
                audit.find(finding)
    if calls and run:
        _judge_against(audit, calls, run)
    audit.numbers = {
        "ranks": len({rank for rank, _ in calls}),
        "num_calls": sum(c.wrappers for c in calls.values()),
        "checks": sum(c.checks for c in calls.values()),
        "rows_mismatch": sum(c.mismatch for c in calls.values()),
        "rows_checked": sum(c.rows for c in calls.values()),
        "mismatch_threshold": threshold,
    }
    partial = "" if run.get("calling_ranks") else _why_partial(calls)
    _conclude(audit, partial)
    return audit


class _Reader:
    """Adds up the lines of the files, and tells of errors and damage."""

    def __init__(
        self, audit: Audit, num_experts: int | None, replaced: bool, accepted: Collection[int]
    ):
        self.calls: dict[tuple[int, str], _Calls] = {}
        self.starts: dict[int, int] = {}
        self._audit, self._replaced, self._accepted = audit, replaced, accepted
        self._num_experts = num_experts or 1 << 40  # of a model that nobody described
        self._errors: set[str] = set()

    def read(self, path: Path) -> None:
        """Read one file.  Raises OSError."""
        torn = ""
        for record, line in _records(path):
            kind, text = record.lastgroup, line.decode(errors="replace").strip()
            if torn and kind != "start":  # only a kill explains a record that was not finished
                self._audit.damage(str(path), f"a damaged record: {torn}")
            torn = ""
            match kind:
                case "wrapper":
                    calls = self._of(record[2], record[1])
                    rows, topk, idx_sum = int(record[3]), int(record[4]), int(record[5])
                    low, high = expert_id_sums(rows, topk, self._num_experts)
                    calls.wrappers += 1
                    calls.wrapped_rows += rows
                    calls.impossible += not low <= idx_sum <= high
                case "check":
                    calls = self._of(record[6], record[7])
                    calls.checks += 1
                    calls.rows += int(record[8])
                    calls.mismatch += int(record[9])
                case "start":
                    rank = int(record[10])
                    self.starts[rank] = self.starts.get(rank, 0) + 1
                case "damaged":
                    torn = text
                case _:
                    self._error(text, by_threshold=kind == "threshold")
        if torn:
            self._audit.notes.append(f"{path} ends within a record: {torn}")

    def _of(self, rank: bytes, stage: bytes) -> _Calls:
        return self.calls.setdefault((int(rank), stage.decode()), _Calls())

    def _error(self, text: str, *, by_threshold: bool) -> None:
        if text in self._errors or len(self._errors) == _MAX_TEXTS:
            return
        self._errors.add(text)
        step = _STEP.search(text)
        if step and int(step[1]) in self._accepted:
            self._audit.notes.append(
                f"accepted, of a step that was trained again: the log says: {text}"
            )
        elif by_threshold and self._replaced:
            self._audit.notes.append(f"the log says, by the threshold of the run: {text}")
        else:
            claim = "agreement" if by_threshold else "applied"
            self._audit.find(Finding(claim, f"the log says: {text}"))


def _records(path: Path) -> Iterator[tuple[re.Match[bytes], bytes]]:
    """The R3 records of a text, wherever in it they stand, and the rest of the line of each."""
    with path.open("rb") as file:
        text, more = b"", True
        while more:
            block = file.read(_BLOCK)
            more = bool(block)
            text += block
            # a record that begins near the end is left for the next round, when all of it is there
            end = max(0, len(text) - _LONGEST) if more else len(text)
            for record in _RECORD.finditer(text):
                if record.start() >= end:
                    break
                shown = text[record.start() : record.start() + _SHOWN]
                yield record, re.split(rb"[\r\n]", shown, maxsplit=1)[0]
            text = text[end:]


def _judge_pairs(
    audit: Audit, calls: Mapping[tuple[int, str], _Calls], num_files: int, starts: Mapping[int, int]
) -> None:
    """Both lines of every call, with the same rows; a kill and the end of a file may part them."""
    some_rows = any(c.rows for c in calls.values())
    for (rank, stage), c in sorted(calls.items()):

        def found(what: str, got: int, expected: str) -> None:
            place = (None, (rank,), "any pass", stage, None)
            audit.find(Finding("covered", what, *place, str(got), expected))

        parted = abs(c.wrappers - c.checks)
        if parted > num_files + starts.get(rank, 0):
            found("R3 check lines", c.checks, f"{c.wrappers} (R3 wrapper lines)")
        elif parted:
            audit.notes.append(
                f"rank {rank}, {stage}: {parted} calls have one of their two lines, as at the end of a"
                " file or of a start"
            )
        elif c.rows != c.wrapped_rows:
            found("rows in R3 check lines", c.rows, str(c.wrapped_rows))
        if some_rows and not c.rows:
            found("rows in R3 check lines", 0, "some, as in other lines")
        if c.impossible:
            found("calls whose replay_idx_sum no distinct experts have", c.impossible, "0")


def _judge_against(
    audit: Audit, calls: Mapping[tuple[int, str], _Calls], run: Mapping[str, Any]
) -> None:
    """The ranks and calls of the lines against those of the run's own evidence."""
    seen = {rank for rank, _ in calls}
    for rank in sorted(set(run.get("calling_ranks", ())) - seen):
        what = "no R3 line in the log files, and calls in the run's evidence"
        audit.find(Finding("covered", what, ranks=(rank,)))
    # of several starts the files may be of one alone
    of_rank = run.get("calls_of_rank", {}) if run.get("starts") == 1 else {}
    for rank, expected in of_rank.items():
        got = sum(c.count for (of, _), c in calls.items() if of == rank)
        if rank in seen and got < expected:
            values = {"got": str(got), "expected": f"{expected}, as in the run's evidence"}
            audit.find(Finding("covered", "calls in R3 lines", ranks=(rank,), **values))


def _why_partial(calls: Mapping[tuple[int, str], _Calls]) -> str:
    """The reason why lines without a run's evidence may not be all; empty where they look whole."""
    seen = {rank for rank, _ in calls}
    missing = set(range(max(seen, default=0))) - seen
    counts = {stage: {calls.get((r, stage), _Calls()).count for r in seen} for stage in STAGES}
    if missing:
        found = f"no R3 line of rank{'s' * (len(missing) > 1)} {ranges(missing)}"
    elif any(len(of) > 1 for of in counts.values()):
        found = "router calls differ between ranks"
    else:
        return ""
    return f"{found}, as with pipeline stages and with lost lines: judge it beside RUN_DIR"


def _conclude(audit: Audit, partial: str) -> None:
    n, reason = audit.numbers, partial
    if not n["checks"]:
        reason = "no R3 check line in the log files"
    elif not n["rows_checked"]:
        reason = f"{n['checks']} R3 check lines in the log files, and not one row in them"
    audit.find_more_damage()
    audit.notes.append(_CANNOT_SHOW)
    shown = ["agreement"] if partial else ["agreement", "covered"]
    audit.conclude(reason, shown=shown if n["rows_checked"] else ())

"""A finished run judged again from the records of all its ranks.

Three claims, kept apart (applied, covered, agreement), and three outcomes: passed, failed with the
place, and no evidence, which is never a pass.  The steps are read in the order of ``steps.jsonl``, one
at a time from all rank files: memory holds the sums of one step and of the run.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from r3train.observe.metrics import METRICS_FILE
from r3train.proof.check import (
    ERRORS,
    Failure,
    judge,
    NATIVE,
    StepExpectation,
    StepTotals,
    StepVerdict,
)
from r3train.proof.controls import beaten_by, CONTROLS
from r3train.proof.findings import Audit, AuditedStep, Finding, MAX_FINDINGS, ranges
from r3train.proof.schema import (
    METRICS,
    read_lines,
    RecordLine,
    RECORDS,
    StepLine,
    STEPS,
)
from r3train.proof.writer import EVIDENCE_DIR, STEPS_FILE
from r3train.types import RouteShape

_CONFIG_FILE = "config.toml"
_RANK_FILE = re.compile(r"rank_([0-9]{5,7})\.jsonl", re.ASCII)
_MAX_UNJUDGED = 1000
_APPLIED = ("fingerprint", "rows_recompute_differ")
# Quantities that are too small where records are missing.
_LOST = ("num_calls", "fingerprint", "rows_replayed", "rows_filled")
_WORDS = {
    "num_calls": "router calls",
    "fingerprint": "route fingerprint",
    "rows_replayed": "rows replayed",
    "rows_filled": "rows with filled slots",
    "rows_native": "rows the router chose itself",
    "duplicate_rows": "rows with fewer experts than top-k",
    "map_deviation": "entries of the routing map beyond rows x top-k",
    "rows_recompute_differ": "recomputed rows that differ from the forward",
    "rows_compared": "rows that agree, overlap and mismatch",
    "rows_mismatch": "rows that share no expert with the trainer's own choice",
    "row_kinds_off": "the kinds of rows do not add up to the rows of a call: their difference",
    "topk_off": "top-k of a call: its difference from the step's",
    "replay_idx_sum_off": "sum of the expert ids that were served: its distance from a possible one",
}


def audit_run(
    run_dir: Path,
    *,
    threshold: float | None = None,
    min_steps: int = 0,
    accept_superseded: bool = False,
    keep_steps: bool = False,
) -> Audit:
    """Judge a run directory.

    threshold: the largest share of rows without a common expert; None takes the one that the run
    recorded, and the run's own verdict by it.  min_steps: fewer judged steps fail.
    accept_superseded: a failure at a step that a later start trained again becomes a note.
    keep_steps: fill ``Audit.steps``.
    Raises ValueError where ``run_dir`` is no directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    return _RunAudit(run_dir, threshold, accept_superseded, keep_steps).audited(min_steps)


@dataclass(frozen=True)
class _Entry:
    """One verdict of steps.jsonl: the start of the run, the step, and the first byte of the line."""

    attempt: str
    step: int
    begin: int
    passed: bool


class _RankFile:
    """The records of one rank, read once from its beginning to its end."""

    def __init__(self, path: Path, rank: int):
        self.path, self.rank = path, rank
        self._offset = self._number = 0

    def take(self, run: _RunAudit, place: int) -> Iterator[RecordLine]:
        """The records of the verdict at ``place``, up to the first record of a later verdict."""
        for line in read_lines(self.path, RECORDS, self._offset, self._number):
            record = line.value
            if record is None:
                run.damaged(self.path, line)
            elif record.rank != self.rank:
                error = f"rank is {record.rank}, expected {self.rank}, whose file this is"
                run.audit.damage(self.path.name, error, line.number)
            else:
                own = run.place_of.get((record.attempt, record.step))
                if own is not None and own > place:
                    return
                run.num_records += 1
                if own is None:
                    run.add_unjudged(record.attempt, record.step)
                elif own < place:
                    error = f"a record of step {record.step}, expected one of a later step"
                    run.audit.damage(self.path.name, error, line.number)
                else:
                    yield record
            self._offset, self._number = line.end, line.number


class _RunAudit:
    """One audit of a run directory while it is made."""

    def __init__(self, run_dir: Path, threshold: float | None, accept: bool, keep_steps: bool):
        self.audit = Audit(str(run_dir))
        self.num_records = 0
        self._run_dir = run_dir
        self._threshold, self._accept, self._keep_steps = threshold, accept, keep_steps
        self._evidence = run_dir / EVIDENCE_DIR
        self._steps_file = self._evidence / STEPS_FILE
        paths = {_RANK_FILE.fullmatch(p.name): p for p in self._evidence.glob("rank_*.jsonl")}
        files = [_RankFile(path, int(match[1])) for match, path in paths.items() if match]
        self._files = {file.rank: file for file in sorted(files, key=lambda file: file.rank)}
        self._entries: list[_Entry] = []
        self.place_of: dict[tuple[str, int], int] = {}
        self._read_verdicts()
        self._latest = {entry.step: i for i, entry in enumerate(self._entries)}
        self._unjudged: dict[str, set[int]] = {}  # start -> steps with records and no verdict
        self._read_metrics()
        # over the steps that count
        self._sums: StepTotals | None = None
        self._chance: dict[str, float] = {}
        self._start: str | None = None  # the last one
        self._shapes: set[tuple[int, int]] = set()
        self._thresholds: set[float] = set()
        self._calls_of_rank: dict[int, int] = {}
        self._callers: set[int] = set()  # ranks with calls in the last start
        self._calls_expected = self._rows_expected = self._world_size = 0
        self._beaten: set[int] = set()  # layers in which a control beat a step's agreement
        # steps to be told of
        self._waived: set[int] = set()
        self._lost: set[int] = set()
        self._failed_before: set[int] = set()
        self._accepted = 0

    def audited(self, min_steps: int) -> Audit:
        """The whole audit."""
        audit = self.audit
        for place, entry in enumerate(self._entries):
            self._judge_step(place, entry)
        for file in self._files.values():  # records behind the last verdict
            for _ in file.take(self, len(self._entries)):
                raise AssertionError("no verdict stands behind the last")
        self._judge_files()
        self._judge_run(min_steps)
        audit.find_more_damage()
        audit.numbers = self._numbers()
        self._conclude()
        return audit

    # -- reading -----------------------------------------------------------------------------

    def damaged(self, path: Path, line: Any) -> None:
        """Note a line that a kill tore at the end of a file; any other is a finding."""
        if line.torn:
            self.audit.notes.append(f"{path.name} ends within a line: its writer was stopped")
        else:
            self.audit.damage(path.name, line.error, line.number)

    def add_unjudged(self, attempt: str, step: int) -> None:
        """Keep a step with records and without a verdict; the first 1000 of them."""
        if sum(map(len, self._unjudged.values())) < _MAX_UNJUDGED:
            self._unjudged.setdefault(attempt, set()).add(step)

    def _read_verdicts(self) -> None:
        if not self._steps_file.exists():
            return
        for line in read_lines(self._steps_file, STEPS):
            if line.value is None:
                self.damaged(self._steps_file, line)
                continue
            key = (line.value.attempt, line.value.step)
            if key in self.place_of:
                error = f"a second verdict of step {key[1]} by the same start"
                self.audit.damage(STEPS_FILE, error, line.number)
                continue
            self.place_of[key] = len(self._entries)
            self._entries.append(_Entry(*key, line.begin, line.value.passed))

    def _read_metrics(self) -> None:
        self._trained: set[int] = set()
        self._judged_then: set[int] = set()
        self._failed_then: set[int] = set()
        path = self._run_dir / METRICS_FILE
        if not path.exists():
            if self._entries:
                self.audit.notes.append(f"no {METRICS_FILE}: only evidence says what was trained")
            return
        for line in read_lines(path, METRICS):
            if line.value is None:
                self.damaged(path, line)
                continue
            self._trained.add(line.value.step)
            if line.value.passed is not None:
                self._judged_then.add(line.value.step)
                if not line.value.passed:
                    self._failed_then.add(line.value.step)

    def _config(self, section: str) -> dict[str, Any]:
        """A section of the run's settings; empty where it cannot be read."""
        try:
            value = tomllib.loads((self._run_dir / _CONFIG_FILE).read_text()).get(section)
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    # -- one step ----------------------------------------------------------------------------

    def _judge_step(self, place: int, entry: _Entry) -> None:
        line = next(read_lines(self._steps_file, STEPS, entry.begin)).value
        counts_now = self._latest[entry.step] == place
        shape = RouteShape(max(line.expected_fingerprints, default=0), line.topk, line.num_experts)
        totals, of_rank = StepTotals(shape), {}
        for rank, file in self._files.items():
            own = StepTotals(shape)
            for record in file.take(self, place):
                own.add(record)
            if own.cells:
                of_rank[rank] = own
                totals.merge(own)
        expectation = _expectation(line)
        limit = line.mismatch_threshold if self._threshold is None else self._threshold
        verdict = judge(totals, expectation, shape, mismatch_threshold=limit)
        findings = list(self._findings(line, totals, of_rank, verdict, superseded=not counts_now))
        for finding in findings:
            self._find(finding, superseded=not counts_now)
        if not counts_now:
            if not line.passed or (findings and not self._accept):
                self._failed_before.add(line.step)
            return
        self._add(line, expectation, totals, of_rank, limit)
        shares = verdict.agreement.items()
        self._chance |= {name: v for name, v in shares if name.startswith("chance_")}
        if self._keep_steps:
            native = {n: totals.counters((*NATIVE, n)) for n in expectation.fingerprints}
            self.audit.steps.append(
                AuditedStep(
                    rollout_id=line.step,
                    passed=not findings and line.step not in self._failed_before,
                    counts=verdict.counts,
                    layers={n: (v["rows_equal"], v["rows_replayed"]) for n, v in native.items()},
                    agreement=verdict.agreement,
                    failures=tuple(map(str, findings[:20])),
                )
            )

    def _findings(
        self,
        line: StepLine,
        totals: StepTotals,
        of_rank: dict[int, StepTotals],
        verdict: StepVerdict,
        *,
        superseded: bool,
    ) -> Iterator[Finding]:
        """Everything that is wrong with a step, and lastly whatever the run said beyond it."""
        failures, found = verdict.failures + verdict.above_threshold, False
        attempt = line.attempt if superseded else ""
        short = {_cell(f) for f in failures if f.what == "num_calls" and f.got < f.expected}
        silent = self._silent_ranks(line, of_rank) if short else ()
        lost = bool(short and (superseded or silent))
        # a call that is missing takes its rows with it
        untold = _LOST if lost else _LOST[1:]
        failures = [f for f in failures if not (f.what in untold and _cell(f) in short)]
        if lost and superseded:  # a crash may take records with it
            self._lost.add(line.step)
        elif lost:
            found = True
            silent = tuple(rank for rank in silent if rank in self._files)  # others have a finding
        if lost and silent and not superseded:
            got, expected = (str(verdict.counts[n]) for n in ("num_calls", "num_calls_expected"))
            what = "router calls, with no record of these ranks,"
            yield Finding("covered", what, line.step, silent, got=got, expected=expected)
        for f in failures:
            found = True
            yield _finding(line, f, _suspects(line, of_rank, f), attempt)
        for layer in line.expected_fingerprints:
            if beaten := beaten_by(totals.counters((*NATIVE, layer))):
                found = True
                self._beaten.add(layer)
                what, got, expected = beaten.words()
                place = (line.step, (), *NATIVE, layer)
                yield Finding("agreement", what, *place, got, expected, attempt)
        if not found:
            yield from self._own_verdict(line, attempt)
            for name, got in verdict.counts.items() if not lost else ():
                if getattr(line.counts, name) != got:
                    what = f"{name} of the step's records, against the count of the run itself,"
                    values = {"got": str(got), "expected": str(getattr(line.counts, name))}
                    yield Finding("covered", what, line.step, **values, attempt=attempt)

    def _own_verdict(self, line: StepLine, attempt: str) -> Iterator[Finding]:
        """The run's own failure, where the records do not show it."""
        said = "the run itself judged it failed"
        if line.passed:
            return
        if line.threshold_error and self._threshold is not None:
            self._waived.add(line.step)
        elif line.threshold_error:
            what = f"{said} ({line.threshold_error:.200})"
            yield Finding("agreement", what, line.step, attempt=attempt)
        if line.failures or not line.threshold_error:
            text = "; ".join(map(str, line.failures[:3])) or "no reason recorded"
            what = f"{said} ({text:.400})"
            applied = any(f.what in _APPLIED for f in line.failures) or not line.failures
            claim = "applied" if applied else "covered"
            yield Finding(claim, what, line.step, attempt=attempt)

    def _silent_ranks(self, line: StepLine, of_rank: dict[int, StepTotals]) -> tuple[int, ...]:
        """Ranks without a record of the step; a rank that never had one, only if all are like it.

        A rank whose file is empty may hold no layer with experts.
        """
        silent = [rank for rank in range(line.world_size) if rank not in of_rank]
        files = self._files
        speak = [r for r in silent if r not in files or files[r].path.stat().st_size]
        return tuple(speak or silent)

    def _find(self, finding: Finding, *, superseded: bool) -> None:
        if not (superseded and self._accept):
            self.audit.find(finding)
            return
        self._accepted += 1
        if self._accepted <= MAX_FINDINGS:
            self.audit.notes.append(f"accepted, of a step that was trained again: {finding}")

    def _add(
        self,
        line: StepLine,
        expectation: StepExpectation,
        totals: StepTotals,
        of_rank: dict[int, StepTotals],
        threshold: float,
    ) -> None:
        if self._start != line.attempt:
            self._start, self._callers = line.attempt, set()
        self._shapes.add((line.num_experts, line.topk))
        self._thresholds.add(threshold)
        self._world_size = max(self._world_size, line.world_size)
        self._calls_expected += expectation.total_calls()
        self._rows_expected += sum(expectation.rows_replayed.values())
        self._callers |= of_rank.keys()
        for rank, own in of_rank.items():
            calls = sum(values[0] for values in own.cells.values())
            self._calls_of_rank[rank] = self._calls_of_rank.get(rank, 0) + calls
        if self._sums is None:
            self._sums = totals
        else:
            self._sums.merge(totals)

    # -- the run -----------------------------------------------------------------------------

    def _judge_files(self) -> None:
        """Find missing files, and steps without evidence."""
        audit, judged = self.audit, sorted(self._latest)
        for rank in sorted(set(range(self._world_size)) - self._files.keys()):
            audit.find(Finding("covered", f"rank_{rank:05d}.jsonl is missing", ranks=(rank,)))
        self._judge_unjudged()
        said = {e.step for e in self._entries if not e.passed}
        if judged and (unsaid := self._failed_then - said):
            text = f"{METRICS_FILE} says that steps {ranges(unsaid)} failed, {STEPS_FILE} does not"
            audit.find(Finding("covered", text, step=min(unsaid)))
        gaps = [range(a + 1, b) for a, b in pairwise(judged) if b > a + 1]
        if gaps:
            shown = ", ".join(f"{g[0]}..{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in gaps[:6])
            text = f"no evidence of steps {shown}, between others that have it"
            audit.find(Finding("covered", text, step=gaps[0][0]))
        missing = {s for s in self._trained - set(judged) if not any(s in gap for gap in gaps)}
        if judged and missing:
            text = f"steps {ranges(missing)} were trained ({METRICS_FILE}) and have no evidence"
            audit.find(Finding("covered", text, step=min(missing)))
        elif judged and judged[0] > 0:
            audit.notes.append(f"evidence begins at step {judged[0]}: the run was resumed there")

    def _judge_unjudged(self) -> None:
        """Records without a verdict: of the step that a kill cut short, or of steps judged later."""
        for attempt, steps in self._unjudged.items():
            before = [e.step for e in self._entries if e.attempt == attempt]
            later = {e.step for e in self._entries if e.attempt > attempt}
            killed = len(steps) == 1 and min(steps) > max(before, default=-1)
            text = f"{STEPS_FILE} has no verdict for steps {ranges(steps)}"
            if killed:
                note = f"step {min(steps)} was not finished (start {attempt}): it is not judged"
                self.audit.notes.append(note)
            elif steps <= later:
                text += f" of start {attempt}; all of them were trained again"
                self.audit.notes.append(text)
            else:
                self.audit.find(Finding("covered", text, step=min(steps)))

    def _judge_run(self, min_steps: int) -> None:
        """Find and note facts that only all steps together show."""
        audit, steps = self.audit, len(self._latest)
        for layer, values in self._native().items():
            # steps of few rows can each be too short to tell
            if layer not in self._beaten and (beaten := beaten_by(values)):
                what, got, expected = beaten.words()
                what = f"over steps {ranges(self._latest)}, {what}"
                place = (None, (), *NATIVE, layer)
                audit.find(Finding("agreement", what, *place, got, expected))
        if 0 < steps < min_steps:
            expected = f"{min_steps} at least"
            audit.find(Finding("covered", "steps with evidence", got=str(steps), expected=expected))
        again = {e.step for i, e in enumerate(self._entries) if self._latest[e.step] != i}
        planned = self._config("rollout").get("num_rollout")
        starts = f"{len(self._starts())} starts in one directory"
        lost, waived = ranges(self._lost), ranges(self._waived)
        notes = {
            f"{starts}: steps {ranges(again)} were trained again, and the latest time counts": again,
            f"records are missing of the first time that steps {lost} were trained": self._lost,
            f"by its own threshold the run judged that steps {waived} failed; {self._threshold} is "
            "judged by in its place": self._waived,
            f"{steps} of the {planned} steps of the configuration": (
                type(planned) is int and 0 < steps < planned
            ),
            f"accepted: {self._accepted - MAX_FINDINGS} more of them": (
                self._accepted > MAX_FINDINGS
            ),
        }
        audit.notes += [note for note, holds in notes.items() if holds]

    def _starts(self) -> set[str]:
        return {e.attempt for e in self._entries} | self._unjudged.keys()

    def _native(self) -> dict[int, dict[str, int]]:
        """Counters by name of each layer, in the pass where the trainer's own choice is compared."""
        cells = sorted(self._sums.cells) if self._sums else []
        return {cell[2]: self._sums.counters(cell) for cell in cells if cell[:2] == NATIVE}

    def _numbers(self) -> dict[str, Any]:
        cells = [self._sums.counters(cell) for cell in self._sums.cells] if self._sums else []
        names = StepTotals(RouteShape(0, 1, 1)).counters(("", "", 0)).keys() - {"fingerprint"}
        experts, topk = next(iter(self._shapes)) if len(self._shapes) == 1 else (None, None)
        failed_now = {s for s, i in self._latest.items() if not self._entries[i].passed}
        failed = {e.step for e in self._entries if not e.passed}
        return {
            "steps": len(self._latest),
            "first_step": min(self._latest, default=None),
            "last_step": max(self._latest, default=None),
            "ranks": len(self._files),
            "calling_ranks": sorted(self._callers),  # of the last start
            "calls_of_rank": dict(sorted(self._calls_of_rank.items())),
            "world_size": self._world_size or None,
            "num_experts": experts,
            "topk": topk,
            "starts": len(self._starts()),
            # steps, of which the time that counts did not fail
            "superseded_failures": sorted(failed - failed_now),
            "records": self.num_records,
            "calls_expected": self._calls_expected,
            "mismatch_threshold": max(self._thresholds, default=None),
            **{name: sum(values[name] for values in cells) for name in sorted(names)},
        }

    def _conclude(self) -> None:
        audit, layers = self.audit, self._native()
        rows = sum(values["rows_replayed"] for values in layers.values())
        if rows:
            for name in ("rows_equal", "rows_overlap", "rows_mismatch", *CONTROLS):
                share = sum(values[name] for values in layers.values()) / rows
                audit.agreement[name.removeprefix("rows_")] = share
            audit.agreement |= self._chance
            audit.layer_agreement = {
                layer: values["rows_equal"] / values["rows_replayed"]
                for layer, values in layers.items()
                if values["rows_replayed"]
            }
        reason = ""
        if not self._entries:
            reason = self._why_nothing()
        elif not self._rows_expected:
            reason = "not one row with recorded routes: there was nothing to replay"
        proved = self._rows_expected and audit.numbers["rows_replayed"]
        audit.conclude(reason, shown=audit.claims if proved else ())

    def _why_nothing(self) -> str:
        """The reason why not one step of the run can be judged."""
        nothing = f"{EVIDENCE_DIR}/ holds no verdict of a step"
        if self._judged_then:
            return (
                f"{METRICS_FILE} has verdicts of steps {ranges(self._judged_then)}, and "
                f"{EVIDENCE_DIR}/ none: it has been removed or emptied"
            )
        replay, trainer = self._config("replay"), self._config("trainer")
        if (self._run_dir / _CONFIG_FILE).exists():
            if not replay.get("use_rollout_routing_replay"):
                return "the run did not use R3 (--use-rollout-routing-replay)"
            if not (trainer.get("ci_test") or replay.get("enable_r3_correctness_check")):
                return "the run's R3 check was off (--enable-r3-correctness-check)"
        elif not self._steps_file.exists():
            return f"no {EVIDENCE_DIR}/ and no {_CONFIG_FILE} in {self._run_dir}: is it a run directory?"
        if self._trained:
            return (
                f"{nothing}, and {METRICS_FILE} has steps {ranges(self._trained)} without one: they "
                "were trained and not judged"
            )
        return f"{nothing}: the run ended before its first step was judged"


def _expectation(line: StepLine) -> StepExpectation:
    """The rollout side's records of a step, as the run judged by them."""
    return StepExpectation(
        line.step,
        line.expected_fingerprints,
        line.expected_rows_replayed,
        line.expected_rows_filled,
        line.expected_calls,
    )


def _finding(line: StepLine, f: Failure, ranks: tuple[int, ...], attempt: str) -> Finding:
    got, expected, claim = str(f.got), str(f.expected), "covered"
    if f.what == "fingerprint":
        got, expected = f"{f.got:#018x}", f"{f.expected:#018x}"
    if f.what == "rows_mismatch":
        expected, claim = f"at most {f.expected:g}", "agreement"
    if f.what in _APPLIED:
        claim = "applied"
    place = (line.step, ranks, f.replay_pass, f.stage, f.layer_number)
    return Finding(claim, _WORDS[f.what], *place, got, expected, attempt)


def _suspects(line: StepLine, of_rank: dict[int, StepTotals], f: Failure) -> tuple[int, ...]:
    """The ranks that a failure points at: at best the one, at worst all that hold the layer."""
    layer = f.layer_number
    holders = {r: t for r, t in of_rank.items() if any(cell[2] == layer for cell in t.cells)}
    own = {rank: totals.counters(_cell(f)) for rank, totals in holders.items()}
    calls = sorted(values["num_calls"] for values in own.values())
    wrong: list[int] = []
    if f.what in ERRORS:
        wrong = [rank for rank, values in own.items() if values[f.what]]
    elif f.what == "num_calls" and own:
        wrong = [r for r, values in own.items() if values[f.what] != calls[len(calls) // 2]]
    elif f.what == "fingerprint":
        for place in line.places:
            got = sum(own[rank][f.what] for rank in place.ranks if rank in own) % (1 << 64)
            if got != place.fingerprints.get(layer, 0):
                wrong += [rank for rank in place.ranks if rank in own]
        # every pass replays the same routes, so a rank whose passes differ is the one
        wrong = wrong or [rank for rank, t in holders.items() if _passes_differ(t, layer)]
    return tuple(sorted(wrong or own))


def _cell(f: Failure) -> tuple[str, str, int]:
    return f.replay_pass, f.stage, f.layer_number


def _passes_differ(totals: StepTotals, layer: int) -> bool:
    cells = [cell for cell in totals.cells if cell[2] == layer]
    return len({totals.counters(cell)["fingerprint"] for cell in cells}) > 1

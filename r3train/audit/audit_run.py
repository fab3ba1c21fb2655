"""A finished run judged again from the records of all its ranks.

Four claims, kept apart (applied, covered, agreement, recheck), and three outcomes: passed, failed with the
place, and no evidence, which is never a pass.  The steps are read in the order of ``steps.jsonl``, one
at a time from all rank files: memory holds the sums of one step and of the run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from r3train.config.files import read_toml
from r3train.data.rotated_files import parts_of
from r3train.observe.metrics import METRICS_FILE
from r3train.proof.judge import (
    agreement_shares,
    Cell,
    COUNTERS,
    ERRORS,
    Failure,
    judge,
    native,
    SAMPLING_MASK,
    StepTotals,
    StepVerdict,
)
from r3train.proof.controls import beaten_by
from r3train.audit.findings import Audit, AuditedStep, Finding, ranges, RECHECK
from r3train.proof.recheck_verdict import recheck_failures
from r3train.audit.evidence_schema import (
    FileLine,
    METRICS,
    read_lines,
    RecordLine,
    RECORDS,
    RESCORED,
    RecheckLine,
    StepLine,
    STEPS,
)
from r3train.proof.writer import EVIDENCE_DIR, rank_file, RECHECK_FILE, STEPS_FILE
from r3train.types import is_checked, next_checked, RouteShape

_RecordT = TypeVar("_RecordT", RecordLine, RecheckLine)
_CONFIG_FILE = "config.toml"
_RANK_FILE = re.compile(r"rank_([0-9]{5,7})\.", re.ASCII)
_MAX_UNJUDGED = 1000
# A call that is missing takes these with it.
_OF_A_CALL = ("fingerprint", "rows_replayed", "rows_filled", "rows_current")
# The claim that fails, and the quantity in words.
_QUANTITIES = {
    "num_calls": ("covered", "router calls"),
    "fingerprint": ("applied", "route fingerprint"),
    "rows_replayed": ("covered", "rows replayed"),
    "rows_filled": ("covered", "rows with filled slots"),
    "rows_left_out": ("covered", "rows that servers computed and did not report"),
    "rows_native": ("covered", "rows the router chose itself"),
    "duplicate_rows": ("covered", "rows with fewer experts than top-k"),
    "map_deviation": ("covered", "entries of the routing map beyond rows x top-k"),
    "rows_recompute_differ": ("applied", "recomputed rows that differ from the forward"),
    "rows_compared": ("covered", "rows that agree, overlap and mismatch"),
    "rows_current": ("covered", "rows of the weight version that the actor holds"),
    "rows_current_mismatch": (
        "agreement",
        "rows of the actor's own weight version that share no expert with its own choice",
    ),
    "later_off": ("covered", "more current-version or dropped rows than rows in total"),
    "slots_dropped": ("covered", "slots whose replayed expert was dropped"),
    "rows_dropped": ("covered", "rows with a replayed expert that was dropped"),
    "dropped_off": ("applied", "slots dropped or kept against --r3-keep-score-ratio"),
    "row_kinds_off": (
        "covered",
        "the kinds of rows do not add up to the rows of a call: the excess",
    ),
    "topk_off": ("covered", "top-k of a call: its difference from the step's"),
    "replay_idx_sum_off": (
        "covered",
        "sum of the expert ids that were served: its distance from a possible one",
    ),
}
# the same in records of stage sampling_mask
_OF_KEPT_TOKENS = {
    "rows_current": ("covered", "tokens that the actor's own weight version drew"),
    "fingerprint": ("applied", "fingerprint of sampling masks"),
    "rows_native": ("covered", "sampled tokens without a sampling mask"),
    "duplicate_rows": ("applied", "sampled tokens that were not left"),
    "map_deviation": (
        "applied",
        "tokens that were left, next to those that were kept: the difference",
    ),
    "rows_current_mismatch": (
        "agreement",
        "tokens of the actor's own weight version for which its likeliest token was not kept",
    ),
}
# sums over the samples that were rechecked; rows count once per layer
_COMPARED = ("samples", "parts", "missed", "rows", "rows_differ", "log_probs", "log_probs_differ")
_LOST = "records are missing of the first time that steps {} were trained"
_AGAIN = "steps {} were trained again by a later start, and the latest time counts"
_STALE = (
    "at steps {} many rows of older weight versions share no expert with the trainer's own choice; the "
    "threshold judges only rows of the version that the actor holds"
)
_WAIVED = "steps {} failed under the run's own threshold; they are judged again under the one given"


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
    recorded, and the run's own verdict by it.  It judges the rows of the weight version that the actor
    held; in evidence that does not tell versions, all rows.  min_steps: fewer judged steps fail.
    accept_superseded: a failure at a step that a later start trained again becomes a note.
    keep_steps: fill ``Audit.steps``.
    Raises ValueError where ``run_dir`` is no directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    return _RunAudit(run_dir, threshold, accept_superseded, keep_steps).audited(min_steps)


@dataclass(frozen=True)
class _Step:
    """One time that a step was trained: the run's verdict, the records, and the verdict on them."""

    line: StepLine
    superseded: bool
    shape: RouteShape
    threshold: float
    of_rank: dict[int, StepTotals]  # of ranks with records
    totals: StepTotals
    verdict: StepVerdict

    @property
    def own_choice(self) -> dict[int, dict[str, int]]:
        """The counters by layer where the trainer's own choice is compared with the routes."""
        place = native(self.line.passes)
        calls = self.line.expected_calls[place[0]]
        kept = calls.get(SAMPLING_MASK, {}).keys()
        layers = self.line.expected_fingerprints.keys() - kept
        return {n: self.totals.counters((*place, n)) for n in sorted(layers)}

    def finding(self, claim: str, what: str, *place: Any, **values: str) -> Finding:
        """A finding of this step; place: ranks, pass, stage and layer."""
        attempt = self.line.attempt if self.superseded else ""
        return Finding(claim, what, self.line.step, *place, **values, attempt=attempt)


class _Records(Generic[_RecordT]):
    """The records of a file and its parts, read once from the first to the latest.

    A running job may make a part of the file meanwhile: lines keep their number within it.
    """

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[_RecordT]):
        self._latest, self._decoder = path, decoder
        self._paths, self._inode = parts_of(path), _inode(path)
        self._part = self._place = self._number = 0

    @property
    def path(self) -> Path:
        """The file that is being read."""
        return self._paths[self._part]

    def is_empty(self) -> bool:
        """True where nothing was written."""
        return not any(path.exists() and path.stat().st_size for path in self._paths)

    def lines_until(
        self, place: int, place_of: dict[tuple[str, int], int]
    ) -> Iterator[FileLine[_RecordT]]:
        """The next lines, up to the first record of a verdict after ``place``.

        A torn one is read anew the next time: its writer may be at it.
        """
        while self._part < len(self._paths):
            known = self._find_again()
            for line in read_lines(self.path, self._decoder, self._place, self._number):
                record = line.value
                if line.number > known:
                    if record and place_of.get((record.attempt, record.step), 0) > place:
                        return
                    yield line
                if line.torn:
                    break
                self._place, self._number = line.end, line.number
            if self._part + 1 == len(self._paths):
                return
            self._part, self._place, self._number = self._part + 1, 0, 0

    def _find_again(self) -> int:
        """Find the files anew if another took a name; the number of lines that were read before of this one."""
        known, inode = 0, _inode(self._latest)
        if inode != self._inode or not self.path.exists():
            found = parts_of(self._latest)
            if len(found) > self._part:
                self._paths, self._inode = found, inode
                known, self._place, self._number = self._number, 0, 0
        return known


def _inode(path: Path) -> int | None:
    """A number that another file of the same name does not have; None without a file."""
    return path.stat().st_ino if path.exists() else None


class _RunAudit:
    """One audit of a run directory while it is made."""

    def __init__(self, run_dir: Path, threshold: float | None, accept: bool, keep_steps: bool):
        self.audit = Audit(str(run_dir))
        self._run_dir = run_dir
        self._threshold, self._accept, self._keep_steps = threshold, accept, keep_steps
        self._steps_file = run_dir / EVIDENCE_DIR / STEPS_FILE
        names = (path.name for path in self._steps_file.parent.glob("rank_*"))
        ranks = sorted({int(match[1]) for match in map(_RANK_FILE.match, names) if match})
        files = {rank: rank_file(run_dir, rank) for rank in ranks}
        self._files = {r: _Records(path, RECORDS) for r, path in files.items() if parts_of(path)}
        self._rechecked = _Records(self._steps_file.with_name(RECHECK_FILE), RESCORED)
        # (start, step) -> its line's number in steps.jsonl
        self._place_of: dict[tuple[str, int], int] = {}
        self._latest: dict[int, int] = {}  # step -> the number of its last line
        self._interval: dict[int, int] = {}  # step -> check_interval of its last line
        self._unchecked = 0  # steps that --r3-check-interval left out
        self._failed: dict[int, int] = {}  # step -> the number of its last line that says so
        self._world_size = 0
        self._trained: set[int] = set()  # metrics.jsonl
        self._failed_in_metrics: set[int] = set()
        self._unjudged: defaultdict[str, set[int]] = defaultdict(set)  # start -> steps
        self._steps_noted: defaultdict[str, set[int]] = defaultdict(set)
        self._failed_before: set[int] = set()  # at a time that does not count
        self._num_records = 0
        self._compared: Counter[str] = Counter()  # over the times that count
        # steps whose samples were to be rechecked, and were not
        self._untold: set[int] = set()
        # over the times that count
        self._sums = StepTotals(RouteShape(0, 1, 1))
        self._own_choice: dict[int, Counter[str]] = {}  # by layer, see ``_Step.own_choice``
        self._calls_of_rank: Counter[int] = Counter()
        self._calls_expected = self._rows_expected = 0
        self._highest_threshold: float | None = None
        self._last: _Step | None = None

    def audited(self, min_steps: int) -> Audit:
        """The whole audit."""
        self._read_metrics()  # first: a running job writes those of a step behind its verdict
        self._read_verdicts()
        for rank in sorted(set(range(self._world_size)) - self._files.keys()):
            self.audit.find(Finding("covered", f"rank_{rank:05d}.jsonl is missing", ranks=(rank,)))
        for line in read_lines(self._steps_file, STEPS) if self._place_of else ():
            verdict = line.value
            if verdict and self._place_of.get((verdict.attempt, verdict.step)) == line.number:
                self._judge_step(line.number, verdict)
        behind = max(self._place_of.values(), default=0) + 1
        for rank in self._files:  # records after the last verdict
            self._records(rank, behind, None)
        self._comparisons(behind)
        self._judge_unjudged()
        self._judge_coverage(min_steps)
        self._judge_agreement()
        self._note_run()
        self._conclude()
        return self.audit

    # -- reading -----------------------------------------------------------------------------

    def _damaged(self, path: Path, line: FileLine[Any]) -> None:
        """Note a line that a kill tore at the end of a file, once; any other is a finding."""
        if line.torn:
            note = f"{path.name} ends within a line: its writer was stopped"
            if note not in self.audit.notes:
                self.audit.notes.append(note)
        else:
            self._find_in_line(path, line.number, line.error)

    def _find_in_line(self, path: Path, number: int, error: str) -> None:
        self.audit.find(Finding("covered", f"{path.name} line {number}: {error}"))

    def _read_verdicts(self) -> None:
        """Index ``steps.jsonl``."""
        for line in read_lines(self._steps_file, STEPS) if self._steps_file.exists() else ():
            verdict = line.value
            if verdict is None:
                self._damaged(self._steps_file, line)
            elif (key := (verdict.attempt, verdict.step)) in self._place_of:
                error = f"a second verdict of step {verdict.step} by the same start"
                self._find_in_line(self._steps_file, line.number, error)
            else:
                self._place_of[key] = self._latest[verdict.step] = line.number
                self._interval[verdict.step] = verdict.check_interval
                self._world_size = max(self._world_size, verdict.world_size)
                if not verdict.passed:
                    self._failed[verdict.step] = line.number

    def _read_metrics(self) -> None:
        path = self._run_dir / METRICS_FILE
        for line in read_lines(path, METRICS) if path.exists() else ():
            if line.value is None:
                self._damaged(path, line)
                continue
            self._trained.add(line.value.step)
            if line.value.passed is not None and not line.value.passed:
                self._failed_in_metrics.add(line.value.step)

    def _comparisons(self, place: int) -> list[RecheckLine]:
        """The comparisons of the verdict at ``place``; those without one are of a step that was not finished."""
        found = []
        for line in self._rechecked.lines_until(place, self._place_of):
            if line.value is None:
                self._damaged(self._rechecked.path, line)
                continue
            own = self._place_of.get((line.value.attempt, line.value.step))
            if own == place:
                found.append(line.value)
            elif own is not None and own < place:
                error = f"a comparison of step {line.value.step}, expected one of a later step"
                self._find_in_line(self._rechecked.path, line.number, error)
        return found

    def _records(self, rank: int, place: int, totals: StepTotals | None) -> None:
        """Add a rank's records of the verdict at ``place`` to ``totals``."""
        file = self._files[rank]
        for line in file.lines_until(place, self._place_of):
            record = line.value
            if record is None:
                self._damaged(file.path, line)
                continue
            if record.rank != rank:
                error = f"rank is {record.rank}, expected {rank}, whose file this is"
                self._find_in_line(file.path, line.number, error)
                continue
            self._num_records += 1
            own = self._place_of.get((record.attempt, record.step))
            if own is None:
                if sum(map(len, self._unjudged.values())) < _MAX_UNJUDGED:
                    self._unjudged[record.attempt].add(record.step)
            elif own < place:
                error = f"a record of step {record.step}, expected one of a later step"
                self._find_in_line(file.path, line.number, error)
            else:
                totals.add(record)

    # -- one step ----------------------------------------------------------------------------

    def _judge_step(self, place: int, line: StepLine) -> None:
        """Judge one time that a step was trained, and add it to the run's sums if it counts."""
        step = self._read_step(place, line)
        findings = [*self._findings(step), *self._untrue(step)]
        accepted = step.superseded and self._accept
        if findings and accepted:
            more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
            text = f"accepted, of a step that was trained again: {findings[0]}{more}"
            self.audit.notes.append(text)
        for finding in () if accepted else findings:
            self.audit.find(finding)
        if step.superseded:
            self._steps_noted[_AGAIN].add(line.step)
            if not line.passed or (findings and not accepted):
                self._failed_before.add(line.step)
            return
        self._add(step)
        if step.verdict.stale_warning:
            self._steps_noted[_STALE].add(line.step)
        if self._keep_steps:
            own_choice = step.own_choice.items()
            layers = {n: (v["rows_equal"], _rows_compared(v)) for n, v in own_choice}
            passed = not findings and line.step not in self._failed_before
            verdict = step.verdict
            self.audit.steps.append(
                AuditedStep(line.step, passed, verdict.counts, layers, verdict.agreement)
            )

    def _read_step(self, place: int, line: StepLine) -> _Step:
        shape = RouteShape(max(line.expected_fingerprints, default=0), line.topk, line.num_experts)
        totals, of_rank = StepTotals(shape), {}
        for rank in self._files:
            own = StepTotals(shape)
            self._records(rank, place, own)
            if own.cells:
                of_rank[rank] = own
                totals.merge(own)
        limit = line.mismatch_threshold if self._threshold is None else self._threshold
        verdict = judge(totals, line, shape, mismatch_threshold=limit)
        superseded = self._latest[line.step] != place
        return _Step(line, superseded, shape, limit, of_rank, totals, verdict)

    def _findings(self, step: _Step) -> Iterator[Finding]:
        """Yield a step's failures; if it has none, its contradictions with the run's own log."""
        failures, found = step.verdict.failures + step.verdict.above_threshold, False
        short = {_cell(f) for f in failures if f.what == "num_calls" and f.got < f.expected}
        untold: tuple[str, ...] = _OF_A_CALL
        if lost := bool(short) and step.superseded:  # a crash may take records with it
            self._steps_noted[_LOST].add(step.line.step)
            untold += ("num_calls",)
        for f in failures:
            if f.what not in untold or _cell(f) not in short:
                found = True
                yield _finding(step, f, self._suspects(step, f))
        for layer, values in step.own_choice.items():
            if beaten := beaten_by(values):
                found = True
                what, got, expected = beaten
                cell = (*native(step.line.passes), layer)
                yield step.finding("agreement", what, (), *cell, got=got, expected=expected)
        for rank in step.of_rank:
            if rank >= step.line.world_size:
                found = True
                what = "world_size of the run is not above the rank of a record"
                yield step.finding("covered", what, (rank,), got=str(step.line.world_size))
        if found:
            return
        yield from self._own_verdict(step)
        for name, got in step.verdict.counts.items() if not lost else ():
            if (said := getattr(step.line.counts, name)) not in (None, got):
                what = f"{name} of the step's records, against the count of the run itself,"
                yield step.finding("covered", what, got=str(got), expected=str(said))
        warned, tells = step.line.stale_warning, step.line.expected_rows_current is not None
        if (
            tells
            and self._threshold is None
            and (warned is None) != (step.verdict.stale_warning is None)
        ):
            what = f"stale_warning of the run is {warned!r:.200}, not as the records have it"
            yield step.finding("agreement", what)

    def _untrue(self, step: _Step) -> Iterator[Finding]:
        """Everything that is wrong with the samples that were rechecked."""
        line = step.line
        records = self._comparisons(self._place_of[line.attempt, line.step])
        judged = [record for record in records if record.noise is not None]
        said = line.sampling.parts if line.sampling is not None else 0
        if len(judged) != said:
            what = f"comparisons of the step in {RECHECK_FILE}"
            values = {"got": str(len(judged)), "expected": str(said)}
            yield step.finding(RECHECK, what, **values)
        found = [(record, f) for record in judged for f in recheck_failures(record)]
        for record, f in found:
            place = ((), f.replay_pass, f.stage, f.layer_number or None)
            expected = f"at most {f.expected}" if "version" not in f.what else str(f.expected)
            values = {"got": str(f.got), "expected": expected}
            yield step.finding(RECHECK, f.what.rstrip(","), *place, **values)
        if not found and line.sampling is not None and line.sampling.failures:
            text = "; ".join(str(f) for f in line.sampling.failures[:3])
            yield step.finding(RECHECK, f"the run itself judged it failed ({text:.400})")
        if step.superseded:
            return
        self._compared["parts"] += len(judged)
        self._compared["samples"] += len({record.sample_id for record in judged})
        self._compared["missed"] += line.sampling.missed if line.sampling is not None else 0
        for record in judged:
            self._compared["rows"] += record.num_rows * len(record.rows_differ)
            self._compared["rows_differ"] += sum(record.rows_differ.values())
            self._compared["log_probs"] += record.num_log_probs
            self._compared["log_probs_differ"] += record.log_probs_differ
        if line.sampling is not None and not judged:
            self._untold.add(line.step)

    def _own_verdict(self, step: _Step) -> Iterator[Finding]:
        """The run's own failure, where the records do not show it."""
        line = step.line
        reasons = [(_QUANTITIES.get(f.what, ("applied",))[0], str(f)) for f in line.failures[:3]]
        if line.threshold_error is not None and self._threshold is None:
            reasons.append(("agreement", line.threshold_error))
        elif line.threshold_error is not None:
            self._steps_noted[_WAIVED].add(line.step)
        untrue = line.sampling is not None and line.sampling.failures
        if not reasons and not line.passed and line.threshold_error is None and not untrue:
            reasons.append(("applied", "no reason recorded"))
        if reasons:
            text = "; ".join(text for _, text in reasons)
            yield step.finding(reasons[0][0], f"the run itself judged it failed ({text:.400})")

    def _suspects(self, step: _Step, f: Failure) -> tuple[int, ...]:
        """The ranks that a failure points at: at best the one, at worst all that hold the layer.

        None for one of the servers'.
        """
        if f.what == "rows_left_out":
            return ()
        layer = f.layer_number
        holders = {r for r, t in step.of_rank.items() if any(cell[2] == layer for cell in t.cells)}
        own = {rank: step.of_rank[rank].counters(_cell(f)).get(f.what, 0) for rank in holders}
        suspects: list[int] = []
        if f.what in ERRORS:
            suspects = [rank for rank, value in own.items() if value]
        elif f.what == "num_calls":
            suspects = self._ranks_with_other_calls(step, own, short=f.got < f.expected)
        elif f.what == "fingerprint":
            suspects = _ranks_with_other_routes(step, own, layer)
        return tuple(sorted(suspects or holders))

    def _ranks_with_other_calls(
        self, step: _Step, calls: dict[int, int], *, short: bool
    ) -> list[int]:
        """Ranks without a record, where calls are missing, or with another number than most.

        A rank whose file is empty may hold no layer with experts: it comes last.
        """
        silent = [r for r in range(step.line.world_size) if r not in step.of_rank] if short else []
        files = self._files
        speakers = [r for r in silent if r not in files or not files[r].is_empty()]
        usual = sorted(calls.values())[len(calls) // 2] if calls else 0
        return speakers or [r for r, count in calls.items() if count != usual] or silent

    def _add(self, step: _Step) -> None:
        """Add a step that counts to the run's sums."""
        self._last = step
        self._highest_threshold = max(self._highest_threshold or 0.0, step.threshold)
        self._calls_expected += step.verdict.counts["num_calls_expected"]
        self._rows_expected += sum(step.line.expected_rows_replayed.values())
        for rank, own in step.of_rank.items():
            self._calls_of_rank[rank] += _router_calls(own)
        self._sums.merge(step.totals)
        for layer, values in step.own_choice.items():
            self._own_choice.setdefault(layer, Counter()).update(values)

    # -- the run -----------------------------------------------------------------------------

    def _judge_unjudged(self) -> None:
        """Records without a verdict: of the step that a kill cut short, or of steps judged later."""
        since = self._verdicts_since() if self._unjudged else set()
        for start, unjudged in self._unjudged.items():
            ended = {step for attempt, step in since if attempt == start}
            if ended & unjudged:
                text = f"steps {ranges(ended & unjudged)} ended while the evidence was read"
                self.audit.notes.append(f"{text} (start {start}): they are not judged")
            steps = unjudged - ended
            if not steps:
                continue
            before = [s for attempt, s in self._place_of.keys() | since if attempt == start]
            later = {step for attempt, step in self._place_of if attempt > start}
            text = f"{STEPS_FILE} has no verdict for steps {ranges(steps)}"
            if len(steps) == 1 and min(steps) > max(before, default=-1):
                note = f"step {min(steps)} was not finished (start {start}): it is not judged"
                self.audit.notes.append(note)
            elif steps <= later:
                note = f"{text} of start {start}; all of them were trained again"
                self.audit.notes.append(note)
            else:
                self.audit.find(Finding("covered", text, step=min(steps)))

    def _verdicts_since(self) -> set[tuple[str, int]]:
        """(start, step) of the verdicts that a running job wrote after those that are judged."""
        lines = read_lines(self._steps_file, STEPS) if self._steps_file.exists() else ()
        verdicts = (line.value for line in lines if line.value is not None)
        return {(verdict.attempt, verdict.step) for verdict in verdicts} - self._place_of.keys()

    def _judge_coverage(self, min_steps: int) -> None:
        """Find steps without evidence, and failures that metrics.jsonl alone has."""
        judged = sorted(self._latest)
        if not judged:
            return
        found: dict[str, int] = {}  # text -> first step
        if unsaid := self._failed_in_metrics - self._failed.keys():
            text = f"{METRICS_FILE} says that steps {ranges(unsaid)} failed, {STEPS_FILE} does not"
            found[text] = min(unsaid)
        for before, after in pairwise(judged):
            # the first step of each start has a verdict: no other interval begins between the two
            interval = self._interval[before]
            first = next_checked(before, interval)
            if first >= after:
                self._unchecked += after - before - 1
                continue
            gap = f"{first}..{after - 1}" if interval == 1 and after - first > 1 else f"{first}"
            found[f"no evidence of steps {gap}, between others that have it"] = first
        beyond = {s for s in self._trained if not judged[0] <= s <= judged[-1]}
        last = self._interval[judged[-1]]
        missing = {s for s in beyond if s < judged[0] or is_checked(s, last)}
        self._unchecked += len(beyond) - len(missing)
        if missing:
            text = f"steps {ranges(missing)} were trained ({METRICS_FILE}) and have no evidence"
            found[text] = min(missing)
        elif judged[0] > 0:
            self.audit.notes.append(
                f"evidence begins at step {judged[0]}: the run was resumed there"
            )
        for text, step in found.items():
            self.audit.find(Finding("covered", text, step=step))
        if self._unchecked:
            self.audit.notes.append(
                f"of {len(judged) + self._unchecked} steps {len(judged)} were checked, with all of"
                " their router calls (--r3-check-interval): nothing is proved of the others"
            )
        if len(judged) < min_steps:
            values = {"got": str(len(judged)), "expected": f"{min_steps} at least"}
            self.audit.find(Finding("covered", "steps with evidence", **values))

    def _judge_agreement(self) -> None:
        """Judge all steps together: steps of few rows can each be too short to tell."""
        if self._last is None:
            return
        found = {f.layer_number for f in self.audit.findings if f.claim == "agreement"}
        layers, place = dict(sorted(self._own_choice.items())), native(self._last.line.passes)
        for layer, values in layers.items():
            if layer not in found and (beaten := beaten_by(values)):
                what, *counts = beaten
                what = f"over steps {ranges(self._latest)}, {what}"
                self.audit.find(Finding("agreement", what, None, (), *place, layer, *counts))
        self.audit.agreement = agreement_shares(list(layers.values()), self._last.shape)
        self.audit.layer_agreement = {
            layer: values["rows_equal"] / _rows_compared(values)
            for layer, values in layers.items()
            if _rows_compared(values)
        }

    def _note_run(self) -> None:
        notes = self.audit.notes
        if self._latest and not (self._run_dir / METRICS_FILE).exists():
            notes.append(f"no {METRICS_FILE}: only evidence says what was trained")
        notes += [text.format(ranges(steps)) for text, steps in self._steps_noted.items()]
        if self._untold:
            text = f"no sample of steps {ranges(self._untold)} was rechecked by its server"
            notes.append(text)
        planned = self._setting("rollout", "num_rollout")
        steps = len(self._latest) + self._unchecked
        if type(planned) is int and 0 < steps < planned:
            notes.append(f"{steps} of the {planned} steps of the configuration")

    def _numbers(self) -> dict[str, Any]:
        last, sums = self._last, dict.fromkeys(COUNTERS, 0)
        kept_rows = 0
        for cell in self._sums.cells:
            counters = self._sums.counters(cell)
            if cell[1] == SAMPLING_MASK:
                kept_rows += counters["rows_replayed"]
                continue
            for name, value in counters.items():
                sums[name] += value
        del sums["fingerprint"]
        return {
            "steps": len(self._latest),
            "first_step": min(self._latest, default=None),
            "last_step": max(self._latest, default=None),
            "ranks": len(self._files),
            # in the last step
            "calling_ranks": (
                sorted(r for r, t in last.of_rank.items() if _router_calls(t)) if last else []
            ),
            "calls_of_rank": dict(sorted(self._calls_of_rank.items())),
            "world_size": self._world_size or None,
            "num_experts": last.shape.num_experts if last else None,
            "topk": last.shape.topk if last else None,
            "starts": len({attempt for attempt, _ in self._place_of} | self._unjudged.keys()),
            # steps that failed, and not at the time that counts
            "superseded_failures": sorted(
                s for s, n in self._failed.items() if n < self._latest[s]
            ),
            "records": self._num_records,
            "calls_expected": self._calls_expected,
            "mismatch_threshold": self._highest_threshold,
            "rows_stale_mismatch": sums["rows_mismatch"] - sums["rows_current_mismatch"],
            "rows_of_sampling_mask": kept_rows,
            "rechecked": {name: self._compared[name] for name in _COMPARED},
            **sums,
        }

    def _conclude(self) -> None:
        audit = self.audit
        if self._files or self._latest:
            audit.numbers = self._numbers()
        reason = ""
        if not self._latest:
            reason = self._why_nothing()
        elif not self._rows_expected:
            reason = "not one row with recorded routes: there was nothing to replay"
        proved = self._rows_expected and audit.numbers["rows_replayed"]
        shown = set(audit.claims) if proved else set()
        if not self._compared["parts"]:
            shown.discard(RECHECK)
        audit.conclude(reason, shown=shown)

    def _why_nothing(self) -> str:
        """The reason why not one step of the run can be judged."""
        has_config = (self._run_dir / _CONFIG_FILE).exists()
        if not has_config and not self._steps_file.exists():
            return f"no {EVIDENCE_DIR}/ and no {_CONFIG_FILE} in {self._run_dir}: is it a run directory?"
        if has_config and not self._setting("replay", "use_rollout_routing_replay"):
            return "the run did not use R3 (--use-rollout-routing-replay)"
        checks = (("trainer", "ci_test"), ("replay", "enable_r3_correctness_check"))
        if has_config and not any(self._setting(*key) for key in checks):
            return "the run's R3 check was off (--enable-r3-correctness-check)"
        if self._trained:
            return (
                f"{METRICS_FILE} has steps {ranges(self._trained)} and {EVIDENCE_DIR}/ no verdict: "
                "they were not judged, or it was removed or emptied"
            )
        return f"{EVIDENCE_DIR}/ holds no verdict: the run ended before its first step was judged"

    def _setting(self, section: str, key: str) -> Any:
        """One of the run's settings; None where it cannot be read."""
        try:
            config = read_toml(self._run_dir / _CONFIG_FILE)
            return config[section][key]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None


def _router_calls(totals: StepTotals) -> int:
    """The calls of routers; sampling masks are none."""
    return sum(values[0] for cell, values in totals.cells.items() if cell[1] != SAMPLING_MASK)


def _rows_compared(values: dict[str, int]) -> int:
    """Count the rows that the rollout recorded in full, rows with dropped slots included."""
    return values["rows_replayed"] + values["rows_dropped"]


def _finding(step: _Step, f: Failure, ranks: tuple[int, ...]) -> Finding:
    words = _QUANTITIES if f.stage != SAMPLING_MASK else _QUANTITIES | _OF_KEPT_TOKENS
    claim, what = words[f.what]
    got, expected = str(f.got), str(f.expected)
    if f.what == "fingerprint":
        got, expected = f"{f.got:#018x}", f"{f.expected:#018x}"
    elif f.what == "rows_current_mismatch":
        expected = f"at most {f.expected:g}"
    return step.finding(claim, what, ranks, *_cell(f), got=got, expected=expected)


def _ranks_with_other_routes(step: _Step, fingerprints: dict[int, int], layer: int) -> list[int]:
    """Ranks whose sum is not that of their data-parallel rank, or is another in another pass.

    fingerprints: by rank, in the pass that failed.
    """
    wrong = []
    for place in step.line.places:
        ranks = [rank for rank in place.ranks if rank in fingerprints]
        got = sum(fingerprints[rank] for rank in ranks) % (1 << 64)
        if got != place.fingerprints.get(layer, 0):
            wrong += ranks
    return wrong or [r for r in fingerprints if _passes_differ(step.of_rank[r], layer)]


def _passes_differ(totals: StepTotals, layer: int) -> bool:
    """Every pass replays the same routes, so a rank whose passes differ is the one."""
    cells = [cell for cell in totals.cells if cell[2] == layer]
    return len({totals.counters(cell)["fingerprint"] for cell in cells}) > 1


def _cell(f: Failure) -> Cell:
    return f.replay_pass, f.stage, f.layer_number

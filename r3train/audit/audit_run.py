"""A finished run judged again from the records of all its ranks, by the verdict of the running job.

Four claims, kept apart (applied, covered, agreement, recheck), with agents custody and with canaries served, and three outcomes: passed, failed with the
place, and no evidence, which is never a pass.  The steps are read in the order of ``steps.jsonl``, one
at a time from all rank files: memory holds the sums of one step and of the run.
"""

from __future__ import annotations

import re
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

from r3train.audit.evidence_schema import (
    CANARIES,
    EvidenceError,
    METRICS,
    read_lines,
    RECORDS,
    RECHECKS,
    CustodyLine,
    RecheckLine,
    ServedLine,
    SESSIONS,
    WEIGHTS,
    StepLine,
    StepReader,
    STEPS,
    Trained,
)
from r3train.audit.findings import Audit, AuditedStep, CUSTODY, Finding, ranges, RECHECK, SERVED
from r3train.chat.token_ledger import ledger_problems
from r3train.config.files import read_toml
from r3train.observe.metrics import METRICS_FILE
from r3train.proof.controls import beaten_by
from r3train.proof.custody_verdict import judge_custody
from r3train.proof.step_verdict import (
    agreement_shares,
    Cell,
    Failure,
    FORWARD,
    judge_step,
    misaligned,
    controls_pass,
    agreement_counts,
    STREAMS,
    StepTotals,
    StepVerdict,
)
from r3train.proof.recheck_verdict import judge_recheck
from r3train.proof.served_verdict import inconclusive, judge_served, statistics_again
from r3train.proof.suspicion import suspicion_texts, Suspicions, verdict_of
from r3train.proof.weights_verdict import WeightsHistory
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, SUSPECT
from r3train.proof.writer import (
    CUSTODY_FILE,
    EVIDENCE_DIR,
    rank_file,
    RECHECK_FILE,
    SERVED_FILE,
    STEPS_FILE,
    WEIGHTS_FILE,
)
from r3train.types import next_checked, ROUTES, RouteShape

_CONFIG_FILE = "config.toml"
_RANK_FILE = re.compile(r"rank_([0-9]{5,7})\.", re.ASCII)
_SPARE_FILES = 64  # that the process has open besides
# A call that is missing takes these with it.
_OF_A_CALL = ("fingerprint", "rows_replayed", "rows_filled", "rows_current")
# The quantities of other claims than *covered*.
_APPLIED = ("fingerprint", "rows_recompute_differ")
_APPLIED_FURTHER = ("duplicate_rows", "map_deviation")
_AGAIN = "steps {} were trained again by a later start, and the latest time counts"
_LOST = "records are missing of the first time that steps {} were trained"
_SUSPECT = "at steps {} a statistic was suspect (docs/proof/r3.md): steps.jsonl has its sums"
_STALE = (
    "at steps {} many rows of older weight versions share no expert with the trainer's own choice; the "
    "threshold judges only rows of the version that the actor holds"
)


def audit_run(
    run_dir: Path,
    *,
    threshold: float | None = None,
    min_steps: int = 0,
    accept_superseded: bool = False,
    keep_steps: bool = False,
) -> Audit:
    """Judge a run directory.

    threshold: the largest share of rows, of the weight version that the actor held, without a common
    expert; None takes the one that the run recorded, and the run's own verdict by it.  min_steps: fewer
    judged steps fail.  accept_superseded: a failure at a step that a later start trained again becomes a
    note.  keep_steps: fill ``Audit.steps``.
    Raises ValueError where ``run_dir`` is no directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    return _RunAudit(run_dir, threshold, accept_superseded, keep_steps).audited(min_steps)


@dataclass(frozen=True)
class _Step:
    """One time that a step was trained: the run's verdict, and the one on its records."""

    line: StepLine
    superseded: bool
    totals: StepTotals
    rechecked: list[RecheckLine]
    sessions: list[CustodyLine]
    canaries: list[ServedLine]
    verdict: StepVerdict

    @property
    def agreement_counts(self) -> dict[int, dict[str, int]]:
        """The counters by layer where the routers' own choice is compared with the routes."""
        return agreement_counts(self.totals, self.line)

    @property
    def lost(self) -> bool:
        """True of a time that does not count, some of whose records a crash took."""
        counts = self.verdict.counts
        return self.superseded and counts["num_calls"] < counts["num_calls_expected"]

    def finding(self, claim: str, what: str, *place: Any, **values: Any) -> Finding:
        """A finding of this step; place: pass, stage and layer."""
        attempt = self.line.attempt if self.superseded else ""
        return Finding(claim, what, self.line.step, *place, **values, attempt=attempt)

    def failed(self, claim: str, f: Failure) -> Finding:
        """A finding of a failure of the verdict."""
        shown = hex if f.what == "fingerprint" else str
        exact = f.what != "rows_current_mismatch" and (claim != RECHECK or "version" in f.what)
        values = {
            "got": shown(f.got),
            "expected": f"{'' if exact else 'at most '}{shown(f.expected)}",
        }
        return self.finding(claim, f.what.rstrip(","), *_cell(f), **values)


class _RunAudit:
    """One audit of a run directory while it is made."""

    def __init__(self, run_dir: Path, threshold: float | None, accept: bool, keep_steps: bool):
        self.audit = Audit(str(run_dir))
        self._run_dir = run_dir
        self._threshold, self._accept, self._keep_steps = threshold, accept, keep_steps
        self._steps_file = run_dir / EVIDENCE_DIR / STEPS_FILE
        names = (path.name for path in self._steps_file.parent.glob("rank_*"))
        self._ranks = sorted({int(match[1]) for match in map(_RANK_FILE.match, names) if match})
        self._place_of: dict[Trained, int] = {}  # line of a verdict in steps.jsonl
        self._latest: dict[int, int] = {}  # step -> the number of its last line
        self._latest_start: dict[int, str] = {}  # step -> the start of that line
        self._interval: dict[int, int] = {}  # step -> check_interval of its last line
        self._failed: set[int] = set()  # steps of which a line says so
        self._world_size = 0
        self._trained: set[int] = set()  # metrics.jsonl
        self._failed_in_metrics: set[int] = set()
        self._unjudged: defaultdict[str, set[int]] = defaultdict(set)  # start -> steps
        self._steps_noted: defaultdict[str, set[int]] = defaultdict(set)
        self._failed_before: set[int] = set()  # at a time that does not count
        # over the times that count
        self._sums: Counter[str] = Counter()
        self._rechecked: Counter[str] = Counter()
        self._sessions: Counter[str] = Counter()
        self._classes: Counter[str] = Counter()  # rows by class
        self._canaries: Counter[str] = Counter()
        self._checksums = {"updates": 0, "readings": 0}  # of what servers hold
        self._canary: ServedLine | None = None  # the last one
        self._largest_gap = 0.0  # mean of a server's canaries
        self._has_canaries: dict[str, bool] = {}  # of each start's first verdict
        self._rows_expected = 0
        self._replayed: Counter[str] = Counter()  # replayed rows by stream
        # by layer, see ``_Step.agreement_counts``
        self._agreement_counts: dict[int, Counter[str]] = {}
        self._last: StepLine | None = None
        # by start
        self._suspicions: dict[str, Suspicions] = {}
        self._suspicions_of_servers: dict[str, Suspicions] = {}

    def audited(self, min_steps: int) -> Audit:
        """The whole audit."""
        try:
            self._read_metrics()  # first: a running job writes those of a step after its verdict
            self._read_verdicts()
            self._judge_steps()
            self._judge_weights()
            self._judge_unjudged()
            whole = True
        except EvidenceError as error:
            self.audit.find(Finding("covered", str(error)))
            whole = False
        if whole:
            self._judge_coverage(min_steps)
        self._judge_agreement()
        self._note_run()
        self._conclude(whole)
        return self.audit

    def _read_verdicts(self) -> None:
        """Index ``steps.jsonl``."""
        for number, line in enumerate(self._verdicts(), start=1):
            key = (line.attempt, line.step)
            if key in self._place_of:
                text = f"a second verdict of step {line.step} by the same start"
                raise EvidenceError(f"{STEPS_FILE}:{number}: {text}")
            self._place_of[key] = self._latest[line.step] = number
            self._latest_start[line.step] = line.attempt
            self._interval[line.step] = line.check_interval
            self._world_size = max(self._world_size, line.world_size)
            if not line.passed:
                self._failed.add(line.step)

    def _verdicts(self) -> Iterator[StepLine]:
        return read_lines(self._steps_file, STEPS) if self._steps_file.exists() else iter(())

    def _read_metrics(self) -> None:
        path = self._run_dir / METRICS_FILE
        for line in read_lines(path, METRICS) if path.exists() else ():
            self._trained.add(line.step)
            if line.passed is not None and not line.passed:
                self._failed_in_metrics.add(line.step)

    # -- the steps ---------------------------------------------------------------------------

    def _judge_steps(self) -> None:
        for rank in sorted(set(range(self._world_size)) - set(self._ranks)):
            self.audit.find(Finding("covered", f"rank_{rank:05d}.jsonl is missing"))
        _allow_open_files(2 * len(self._ranks) + _SPARE_FILES)
        files = {r: StepReader(rank_file(self._run_dir, r), RECORDS) for r in self._ranks}
        rechecked = StepReader(self._steps_file.with_name(RECHECK_FILE), RECHECKS)
        sessions = StepReader(self._steps_file.with_name(CUSTODY_FILE), SESSIONS)
        canaries = StepReader(self._steps_file.with_name(SERVED_FILE), CANARIES)
        for place, line in enumerate(islice(self._verdicts(), len(self._place_of)), start=1):
            layers = [max(stream.fingerprints, default=0) for stream in line.streams.values()]
            shape = RouteShape(max(layers), line.topk, line.num_experts)
            totals = StepTotals(shape)
            for rank, file in files.items():
                for record in self._records_of_step(file, place):
                    if record.rank != rank or rank >= line.world_size:
                        text = f"a record of rank {record.rank} of {line.world_size} at step {line.step}"
                        raise EvidenceError(f"{file.name}: {text}")
                    totals.add(record)
            compared = list(self._records_of_step(rechecked, place))
            trained = list(self._records_of_step(sessions, place))
            served = list(self._canaries_of(canaries, place))
            limit = line.mismatch_threshold if self._threshold is None else self._threshold
            suspicions = self._suspicions.setdefault(
                line.attempt, Suspicions(line.suspect_limit, line.calibrating)
            )
            verdict = judge_step(
                totals, line, shape, mismatch_threshold=limit, suspicions=suspicions
            )
            if line.recheck is not None or compared:
                missed = line.recheck.missed if line.recheck else 0
                verdict = replace(verdict, recheck=judge_recheck(compared, missed, suspicions))
            verdict = replace(verdict, custody=judge_custody(trained), served=judge_served(served))
            superseded = self._latest[line.step] != place
            self._add(_Step(line, superseded, totals, compared, trained, served, verdict))
        list(self._canaries_of(canaries, len(self._place_of) + 1))
        for file in (*files.values(), rechecked, sessions):  # what follows the last verdict
            list(self._records_of_step(file, len(self._place_of) + 1))

    def _records_of_step(self, file: StepReader, place: int) -> Iterator[Any]:
        """Yield the records of the verdict at ``place``; those without one are of an unfinished step."""
        for record_place, record in file.until(place, self._place_of):
            if record_place == place:
                yield record
            elif record_place:
                text = f"records of step {record.step} stand after those of a later one"
                raise EvidenceError(f"{file.name}: {text}")
            elif record.step not in self._unjudged[record.attempt]:
                self._unjudged[record.attempt].add(record.step)

    def _canaries_of(self, file: StepReader, place: int) -> Iterator[ServedLine]:
        """Yield the canaries of the verdict at ``place``, and judge those of updates without one on their own."""
        for record_place, record in file.until(place, self._place_of):
            record = self._added_up(record)
            if record_place == place:
                yield record
            elif record_place:
                text = f"canaries of version {record.step} stand after those of a later one"
                raise EvidenceError(f"{file.name}: {text}")
            else:
                self._add_canaries([record])
                for text in judge_served([record]).failures:
                    self._find_at_update(text, record.attempt, record.step)

    def _find_at_update(self, text: str, attempt: str, step: int) -> None:
        """Find what servers did not hold or compute after an update of a start; a later start may have trained the step."""
        superseded = self._latest_start.get(step, "") > attempt
        finding = Finding(SERVED, text, step, attempt=attempt if superseded else "")
        if superseded and self._accept:
            self.audit.notes.append(f"accepted, of a step that was trained again: {finding}")
        else:
            self.audit.find(finding)

    def _added_up(self, record: ServedLine) -> ServedLine:
        """Return a record with the sums that its values, and those of the records before it, add up to."""
        suspicions = self._suspicions_of_servers.setdefault(
            record.attempt, Suspicions(record.limit)
        )
        again = statistics_again(record, suspicions)
        if record.statistics != again:
            what = f"statistics of server {record.server} of the run's own verdict"
            values = {"got": f"{record.statistics!s:.400}", "expected": f"{again!s:.400}"}
            self.audit.find(Finding(SERVED, what, record.step, **values))
        return replace(record, statistics=again)

    def _judge_weights(self) -> None:
        """Judge what servers said of their tensors, of every start on its own, and that each judged step has it."""
        path = self._steps_file.with_name(WEIGHTS_FILE)
        lines = read_lines(path, WEIGHTS) if path.exists() else ()
        counts: Counter[Trained] = Counter()
        histories: defaultdict[str, WeightsHistory] = defaultdict(WeightsHistory)
        for (attempt, step, _), records in groupby(lines, lambda r: (r.attempt, r.step, r.sent)):
            for text in histories[attempt].judge(update := list(records)):
                self._find_at_update(text, attempt, step)
            counts[attempt, step] += len(update)
        if counts:
            self.audit.claims.setdefault(SERVED, NO_EVIDENCE)
        self._checksums = {"updates": len(counts), "readings": counts.total()}
        for line in self._verdicts():
            got = counts[line.attempt, line.step]
            if line.held is not None and got != line.held:
                what = f"servers in {WEIGHTS_FILE}"
                values = {"got": str(got), "expected": str(line.held)}
                self.audit.find(Finding(SERVED, what, line.step, **values))

    def _add_canaries(self, records: Sequence[ServedLine]) -> None:
        if not records:
            return
        self.audit.claims.setdefault(SERVED, NO_EVIDENCE)
        self._canary = records[-1]
        self._canaries.update(
            updates=1,
            readings=len(records),
            inconclusive=sum(map(inconclusive, records)),
            rows=sum(record.rows for record in records),
            rows_left=sum(record.rows_left for record in records),
        )
        self._largest_gap = max(self._largest_gap, *(record.gap_mean for record in records))

    def _add(self, step: _Step) -> None:
        """Find what is wrong with one time that a step was trained, and add it to the sums if it counts."""
        findings, line, verdict = list(_findings(step)), step.line, step.verdict
        self._add_canaries(step.canaries)
        # later updates are judged as --r3-canary-share allows
        has_canaries = line.served is not None
        if has_canaries and not self._has_canaries.setdefault(line.attempt, has_canaries):
            what = "the run's own verdict on canaries is missing at the start's first step"
            findings.append(step.finding(SERVED, what))
        self._has_canaries.setdefault(line.attempt, has_canaries)
        if line.custody is not None or step.sessions:
            self.audit.claims.setdefault(CUSTODY, NO_EVIDENCE)
        if step.lost:
            self._steps_noted[_LOST].add(line.step)
        if not findings:
            findings = list(_contradictions(step, run_threshold=self._threshold is None))
        if findings and step.superseded and self._accept:
            more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
            text = f"accepted, of a step that was trained again: {findings[0]}{more}"
            self.audit.notes.append(text)
            findings = []
        for finding in findings:
            self.audit.find(finding)
        if step.superseded:
            self._steps_noted[_AGAIN].add(line.step)
            if not line.passed or findings:
                self._failed_before.add(line.step)
            return
        self._last = line
        self._sums.update(verdict.counts)
        self._rows_expected += sum(
            sum(stream.rows_replayed.values()) for stream in line.streams.values()
        )
        for cell in step.totals.cells:
            self._replayed[cell[1]] += step.totals.counters(cell)["rows_replayed"]
        for layer, values in step.agreement_counts.items():
            self._agreement_counts.setdefault(layer, Counter()).update(values)
        self._add_rechecked(step)
        for label, version_counts in (line.rows_by_class or {}).items():
            self._classes[label] += sum(version_counts.values())
        self._sessions.update(
            sessions=len(step.sessions),
            tokens=sum(session.num_tokens for session in step.sessions),
            samples=sum(len(session.samples) for session in step.sessions),
        )
        if verdict.stale_warning:
            self._steps_noted[_STALE].add(line.step)
        if verdict.verdict == SUSPECT:
            self._steps_noted[_SUSPECT].add(line.step)
            parts = {"agreement": verdict, RECHECK: verdict.recheck, SERVED: verdict.served}
            for claim, part in parts.items():
                if part is not None and part.verdict == SUSPECT:
                    self.audit.suspects.add(claim)
        if self._keep_steps:
            failed = findings or line.step in self._failed_before
            self.audit.steps.append(AuditedStep(line.step, FAILED if failed else verdict.verdict))

    def _add_rechecked(self, step: _Step) -> None:
        judged = [record for record in step.rechecked if record.noise is not None]
        rows = [rows for record in judged for rows in (record.decoded, record.prefilled)]
        sums = {
            "samples": len({record.sample_id for record in judged}),
            "parts": len(judged),
            "missed": step.line.recheck.missed if step.line.recheck else 0,
            "rows": sum(r.pairs for r in rows),
            "rows_differ": sum(sum(r.differ.values()) for r in rows),
            "log_probs": sum(r.num_log_probs for r in judged),
            "log_prob_off": sum(r.num_log_probs * r.log_prob_off for r in judged),
        }
        self._rechecked.update(sums)

    # -- the run -----------------------------------------------------------------------------

    def _judge_unjudged(self) -> None:
        """Judge records without a verdict: of the step that a kill cut short, or of steps judged later."""
        now = {(line.attempt, line.step) for line in self._verdicts()} if self._unjudged else set()
        for start, steps in self._unjudged.items():
            ended = {step for attempt, step in now if attempt == start}
            steps = steps - ended  # a running job has judged the others meanwhile
            later = {step for attempt, step in self._place_of if attempt > start}
            if len(steps) == 1 and min(steps) > max(ended, default=-1):
                note = f"step {min(steps)} was not finished (start {start}): it is not judged"
                self.audit.notes.append(note)
            elif not steps <= later:
                text = f"{STEPS_FILE} has no verdict for steps {ranges(steps)}"
                self.audit.find(Finding("covered", text, min(steps)))
            elif steps:
                self._steps_noted[_LOST] |= steps

    def _judge_coverage(self, min_steps: int) -> None:
        """Find steps without evidence, and failures that metrics.jsonl alone has."""
        judged = sorted(self._latest)
        if not judged:
            return
        found: dict[str, int] = {}  # text -> first step
        if unsaid := self._failed_in_metrics - self._failed:
            text = f"{METRICS_FILE} says that steps {ranges(unsaid)} failed, {STEPS_FILE} does not"
            found[text] = min(unsaid)
        first, end = min({*self._trained, judged[0]}), max({*self._trained, judged[-1]}) + 1
        if first < judged[0]:
            found[f"no evidence of steps {first}..{judged[0] - 1}"] = first
        for before, after in pairwise([*judged, end]):
            # the first step of each start has a verdict: no other interval begins between the two
            if (step := next_checked(before, self._interval[before])) < after:
                found[f"no evidence of step {step}, which was to be checked"] = step
        for text, step in found.items():
            self.audit.find(Finding("covered", text, step))
        self._sums["unchecked"] = end - first - len(judged)
        if self._sums["unchecked"]:
            self.audit.notes.append(
                f"of {end - first} steps {len(judged)} were checked, with all of"
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
        layers = dict(sorted(self._agreement_counts.items()))
        place = controls_pass(self._last.passes), ROUTES, FORWARD
        for layer, values in layers.items():
            if layer not in found and (beaten := beaten_by(values)):
                what, *counts = beaten
                what = f"over steps {ranges(self._latest)}, {what}"
                self.audit.find(Finding("agreement", what, None, *place, layer, *counts))
        shape = RouteShape(0, self._last.topk, self._last.num_experts)
        self.audit.agreement = agreement_shares(list(layers.values()), shape)
        self.audit.layer_agreement = {
            layer: values["rows_equal"] / values["rows_replayed"]
            for layer, values in layers.items()
            if values["rows_replayed"]
        }

    def _note_run(self) -> None:
        notes = self.audit.notes
        if self._latest and not (self._run_dir / METRICS_FILE).exists():
            notes.append(f"no {METRICS_FILE}: only evidence says what was trained")
        notes += [text.format(ranges(steps)) for text, steps in self._steps_noted.items()]
        planned = self._setting("rollout", "num_rollout")
        steps = len(self._latest) + self._sums["unchecked"]
        if type(planned) is int and 0 < steps < planned:
            notes.append(f"{steps} of the {planned} steps of the configuration")

    def _conclude(self, whole: bool) -> None:
        audit = self.audit
        if self._last is not None:
            audit.numbers = {
                "steps": len(self._latest),
                "suspect": len(self._steps_noted[_SUSPECT]),
                "ranks": len(self._ranks),
                **{f"rows_of_{name}": self._replayed[name] for name in STREAMS if name != ROUTES},
                "rechecked": dict(self._rechecked),
                **({"rows_by_class": dict(self._classes)} if self._classes else {}),
                **({"custody": dict(self._sessions)} if CUSTODY in audit.claims else {}),
                **({"served": self._served_numbers()} if self._canary is not None else {}),
                "checksums": self._checksums,
                **self._sums,
            }
        reason = ""
        if not self._latest:
            reason = self._why_nothing()
        elif not self._rows_expected:
            reason = "not one row with recorded routes: there was nothing to replay"
        proved = whole and self._rows_expected and self._sums["rows_replayed"]
        shown = set(audit.claims) if proved else set()
        if not self._rechecked["parts"]:
            shown.discard(RECHECK)
        audit.conclude(reason, shown=shown)

    def _served_numbers(self) -> dict[str, Any]:
        noise = self._canary.noise
        return {
            **self._canaries,
            "gap_mean": self._largest_gap,
            "repeat_off": noise.repeat.log_prob_off,
            "exact": noise.repeat.is_none,
            "coverage": asdict(self._canary.coverage),
        }

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


def _findings(step: _Step) -> Iterator[Finding]:
    """Yield a step's failures: what ``judge_step`` finds in the records that are left."""
    if not step.lost:
        failures = step.verdict.failures
        short = {_cell(f) for f in failures if f.what == "num_calls" and f.got < f.expected}
        for f in failures + step.verdict.above_threshold:
            if f.what not in _OF_A_CALL or _cell(f) not in short:
                yield step.failed(_claim_of(f), f)
        for place, (what, got, expected) in misaligned(step.totals, step.line):
            yield step.finding("agreement", what, *place, got=got, expected=expected)
    if recheck := step.verdict.recheck:
        for f in recheck.failures:
            yield step.failed(RECHECK, f)
        limit = step.line.suspect_limit
        failed = [s for s in recheck.statistics if verdict_of([s], limit) == FAILED]
        for text in () if recheck.failures else suspicion_texts(failed, limit, "the step"):
            yield step.finding(RECHECK, text)
    for text in step.verdict.served.failures if step.verdict.served else ():
        yield step.finding(SERVED, text)
    for session in step.sessions:
        for text in ledger_problems(session):
            yield step.finding(CUSTODY, text)


def _contradictions(step: _Step, *, run_threshold: bool) -> Iterator[Finding]:
    """Yield the parts of the verdict that the run wrote that are not what its records give.

    run_threshold: the threshold is the run's, not one of the command line.
    """
    line, verdict = step.line, step.verdict
    claim = _claim_of(line.failures[0]) if line.failures else "applied"
    parts = [
        (claim, "failures", [str(f) for f in line.failures], []),
        (RECHECK, "recheck", line.recheck, verdict.recheck),
        (CUSTODY, "custody", line.custody, verdict.custody),
        (SERVED, "served", line.served, verdict.served),
    ]
    if not step.lost:
        parts.append(("covered", "counts", line.counts, verdict.counts))
        parts.append(("agreement", "agreement", line.agreement, verdict.agreement))
    if run_threshold:
        parts.append(("agreement", "threshold_error", line.threshold_error, None))
    if run_threshold and not step.lost:
        parts.append(("agreement", "stale_warning", line.stale_warning, verdict.stale_warning))
        parts.append(("agreement", "statistics", line.statistics, verdict.statistics))
        parts.append(("agreement", "verdict", line.verdict, verdict.verdict))
    differ = [part for part in parts if part[2] != part[3]]
    if run_threshold and not line.passed and not differ:
        differ.append(("applied", "passed", False, True))
    for claim, name, written, got in differ:
        if isinstance(written, dict):
            keys = sorted(
                key for key in written.keys() | got.keys() if written.get(key) != got.get(key)
            )
            name, written, got = f"{name}.{keys[0]}", written.get(keys[0]), got.get(keys[0])
        values = {"got": f"{written!s:.400}", "expected": f"{got!s:.400}, as its records have it"}
        yield step.finding(claim, f"{name} of the run's own verdict", **values)


def _cell(f: Failure) -> Cell:
    return f.replay_pass, f.stream, f.stage, f.layer_number


def _claim_of(f: Failure) -> str:
    if f.what == "rows_current_mismatch":
        return "agreement"
    further = f.stream != ROUTES and f.what in _APPLIED_FURTHER
    return "applied" if further or f.what in _APPLIED else "covered"


def _allow_open_files(count: int) -> None:
    """Raise the process's own limit on open files, where it is lower and may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

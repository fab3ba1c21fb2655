"""What a run's files show beside the records: missing and cut ones, steps without evidence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from r3train.proof.audit_lines import BrokenLines
from r3train.proof.audit_read import EvidenceFiles
from r3train.proof.audit_result import Audit, Finding, ranges
from r3train.observe.metrics import METRICS_FILE
from r3train.observe.run_files import CONFIG_FILE, metrics_lines, section
from r3train.proof.writer import EVIDENCE_DIR, STEPS_FILE


class TrainedSteps:
    """The steps of metrics.jsonl: all of them, those judged (``r3/passed``), and those that failed."""

    def __init__(self, run_dir: Path):
        self.trained: set[int] = set()
        self.judged: set[int] = set()
        self.failed: set[int] = set()
        self.broken = BrokenLines()
        self.notices: list[str] = []
        self.missing = False
        number = 0
        try:
            for number, metrics in metrics_lines(run_dir, self.broken, self.notices):
                self._add(metrics)
        except FileNotFoundError:
            self.missing = True
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
            self.broken.add(METRICS_FILE, number + 1, text)

    def _add(self, metrics: dict[str, Any]) -> None:
        step, passed = metrics["step"], metrics.get("r3/passed")
        self.trained.add(step)
        if passed is not None:
            self.judged.add(step)
        if passed is False:
            self.failed.add(step)


def why_nothing(run_dir: Path, config: dict[str, Any], steps: TrainedSteps) -> str:
    """Why not one step of the run can be judged."""
    if steps.judged:
        return (
            f"{METRICS_FILE} has verdicts of steps {ranges(steps.judged)}, and {EVIDENCE_DIR}/ none: "
            "what was there has been removed or emptied"
        )
    replay = section(config, "replay")
    if config and not replay.get("use_rollout_routing_replay"):
        return "the run did not use R3 (--use-rollout-routing-replay)"
    checked = section(config, "trainer").get("ci_test") or replay.get("enable_r3_correctness_check")
    if config and not checked:
        return "the run's R3 check was off (--enable-r3-correctness-check)"
    nothing = f"{EVIDENCE_DIR}/ holds no verdict of a step"
    if steps.trained:
        return (
            f"{nothing}, and {METRICS_FILE} has steps {ranges(steps.trained)} without one: they "
            "were trained and not judged"
        )
    if steps.broken.count:
        return f"{nothing}, and {METRICS_FILE} cannot be read: {_first(steps.broken)}"
    if config or (run_dir / EVIDENCE_DIR / STEPS_FILE).exists():
        return f"{nothing}: the run ended before its first step was judged"
    return f"no {EVIDENCE_DIR}/ and no {CONFIG_FILE} in {run_dir}: is it a run directory?"


def judge_files(
    audit: Audit,
    files: EvidenceFiles,
    steps: TrainedSteps,
    *,
    world_size: int,
    silent: dict[int, list[int]],
) -> None:
    """Find what is missing, cut or broken; to be called when all steps were read.

    world_size: 0 where no step says it.  silent: rank -> steps that lack calls and have no record
    of it.
    """
    world = world_size or len(files.rank_files)
    for rank in sorted(set(range(world)) - files.rank_files.keys()):
        audit.find(Finding("covered", f"rank_{rank:05d}.jsonl is missing", ranks=(rank,)))
    for rank, missing in sorted(silent.items()):
        if rank in files.rank_files:
            none = "" if rank in files.speakers else ", nor of any other"
            text = f"no record of steps {ranges(missing)}{none}"
            if f"rank_{rank:05d}.jsonl" in files.truncated:
                text += ", and its file ends within a line: it was cut"
            audit.find(Finding("covered", text, step=min(missing), ranks=(rank,)))
    _broken_lines(audit, files.broken)
    for rank, count in sorted(files.out_of_order.items()):
        audit.find(Finding("covered", f"{count} records out of their order", ranks=(rank,)))
    audit.notes += [f"{n} ends within a line: its writer was stopped" for n in files.truncated]
    _unfinished_steps(audit, files, steps)
    _broken_lines(audit, steps.broken)
    if steps.missing:
        audit.notes.append(f"no {METRICS_FILE}: which steps were trained, evidence alone says")
    audit.notes += steps.notices
    if files.judged_steps:
        _steps_without_evidence(audit, files, steps)


def _broken_lines(audit: Audit, broken: BrokenLines) -> None:
    for name, texts in broken.first.items():
        for text in texts:
            audit.find(Finding("covered", text))
        if more := broken.more(name):
            audit.find(Finding("covered", f"{name}: {more} more broken lines"), count=more)


def _unfinished_steps(audit: Audit, files: EvidenceFiles, trained: TrainedSteps) -> None:
    for attempt, steps in files.unfinished.items():
        open_steps = sorted(steps)
        crash = len(steps) == 1 and open_steps[0] > max(files.judged_in(attempt), default=-1)
        missing = f"{STEPS_FILE} has no verdict for steps {ranges(open_steps)}"
        if crash:
            text = f"step {open_steps[0]} was not finished (start {attempt}): it is not judged"
            audit.notes.append(text)
        elif steps <= files.judged_after(attempt) and not steps & trained.failed:
            audit.notes.append(f"{missing} of start {attempt}; all of them were trained again")
        else:
            audit.find(Finding("covered", missing, step=open_steps[0]))


def _steps_without_evidence(audit: Audit, files: EvidenceFiles, steps: TrainedSteps) -> None:
    judged = files.judged_steps
    gaps = [(a + 1, b - 1) for a, b in pairwise(judged) if b > a + 1]
    trained = sorted(steps.trained - set(judged))
    trained = [step for step in trained if not any(a <= step <= b for a, b in gaps)]
    if gaps:
        # as runs: one damaged number makes a gap that is too long to list
        shown = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in gaps[:6])
        text = f"no evidence of steps {shown}, between others that have it"
        audit.find(Finding("covered", text, step=gaps[0][0]))
    if trained:
        text = f"steps {ranges(trained)} were trained ({METRICS_FILE}) and have no evidence"
        audit.find(Finding("covered", text, step=trained[0]))
    if judged[0] > 0 and not trained:
        audit.notes.append(f"evidence begins at step {judged[0]}: the run was resumed there")


def _first(broken: BrokenLines) -> str:
    return next(iter(broken.first.values()))[0]

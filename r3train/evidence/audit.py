"""Does a run's own evidence prove R3?  Judged again from the records, not taken from the verdicts.

Three claims, kept apart (applied, covered, agreement), and three outcomes: passed, failed with what
and where, and no evidence, which is never a pass.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from r3train.evidence.audit_read import Cell, EvidenceFiles, StepEvidence
from r3train.evidence.audit_result import FAILED, PASSED, Audit, Finding, ranges
from r3train.evidence.check import COUNTERS, STAGES, StepExpectation, judge
from r3train.evidence.metrics import METRICS_FILE, read_metrics
from r3train.evidence.writer import EVIDENCE_DIR, STEPS_FILE

_COLUMN = {name: i for i, name in enumerate(COUNTERS)}
_INT64 = (1 << 63) - 1
_APPLIED = ("fingerprint", "rows_recompute_differ")
_ROWS = ("rows_equal", "rows_overlap", "rows_mismatch")
_WORDS = {
    "num_calls": "router calls",
    "fingerprint": "route fingerprint",
    "rows_replayed": "rows replayed",
    "rows_filled": "rows with filled slots",
    "rows_native": "rows the router chose itself",
    "duplicate_rows": "rows with fewer experts than top-k",
    "map_deviation": "entries of the routing map beyond rows x top-k",
    "rows_recompute_differ": "recomputed rows that differ from the forward",
}


def audit_run(run_dir: Path, *, threshold: float | None = None) -> Audit:
    """Judge a run directory.

    threshold: share of rows without a common expert that may be; None takes what the run recorded.
    Raises ValueError where ``run_dir`` is no directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such run directory")
    audit = Audit(str(run_dir))
    config = _config(run_dir)
    files = EvidenceFiles(run_dir)
    if not files.rank_files and not files.judged_steps:
        audit.reason = _why_nothing(run_dir, config)
        return audit
    state = _Sums()
    for step in files.steps():
        recorded = step.line["mismatch_threshold"]
        _judge_step(audit, files, state, step, recorded if threshold is None else threshold)
    _judge_files(audit, files, state, run_dir)
    _conclude(audit, files, state)
    return audit


@dataclass
class _Sums:
    """Sums over the steps that count."""

    table: dict[Cell, np.ndarray] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    # rank -> steps without a record of it while calls were missing
    silent: dict[int, list[int]] = field(default_factory=dict)
    num_steps: int = 0
    calls_expected: int = 0
    rows_expected: int = 0
    world_size: int = 0
    thresholds: set[float] = field(default_factory=set)


def _judge_step(
    audit: Audit, files: EvidenceFiles, sums: _Sums, step: StepEvidence, threshold: float
) -> None:
    line = step.line
    expectation = _expectation(step)
    before = audit.num_findings
    passes = tuple(line["passes"])
    _add(sums, step, expectation)
    sums.thresholds.add(threshold)
    for cell, ranks in sorted(step.unexpected.items()):
        what = "router calls that nobody expected"
        audit.find(_at("covered", what, step, cell, tuple(sorted(ranks))))
    layers = max(expectation.fingerprints, default=0)
    table = np.zeros((len(passes), len(STAGES), layers + 1, len(COUNTERS)), dtype=np.int64)
    for (p, s, layer), counted in step.cells.items():
        values = [min(value, _INT64) for value in counted]
        values[1] = _signed(counted[1])
        table[passes.index(p), STAGES.index(s), layer] = values
    # agreement is added up over the run instead: one expert of one is a model without chance
    verdict = judge(
        table, passes, expectation, mismatch_threshold=float("inf"), num_experts=1, topk=1
    )
    short = any(f.what == "num_calls" and f.got < f.expected for f in verdict.failures)
    silent = _silent_ranks(files, step) if short else []
    for rank in silent:
        sums.silent.setdefault(rank, []).append(step.step)
    for f in verdict.failures:
        if silent and f.what in ("num_calls", "fingerprint", "rows_replayed", "rows_filled"):
            continue  # what a missing rank takes with it
        cell = (f.replay_pass, f.stage, f.layer_number)
        claim = "applied" if f.what in _APPLIED else "covered"
        got, expected = str(f.got), str(f.expected)
        if f.what == "fingerprint":
            got, expected = f"{f.got:#018x}", f"{f.expected:#018x}"
        ranks = _suspects(step, cell, f.what)
        audit.find(_at(claim, _WORDS.get(f.what, f.what), step, cell, ranks, got, expected))
    for (cell, name), ranks in sorted(step.at_fault.items()):
        if name == "row kinds":
            what = "the kinds of rows do not add up to the rows of a call"
            audit.find(_at("covered", what, step, cell, tuple(sorted(ranks))))
    for cell in sorted(step.cells):
        _judge_mismatch(audit, step, cell, threshold)
    if silent or audit.num_findings > before:
        return
    if not line["passed"]:
        texts = [line["threshold_error"]] if line["threshold_error"] else []
        texts += [_recorded_text(f) for f in line["failures"][:3]]
        text = "; ".join(texts) or "no reason recorded"
        audit.find(Finding("applied", f"the run itself judged it failed ({text})", step.step))
    for name in COUNTERS[2:]:
        counted = sum(values[_COLUMN[name]] for values in step.cells.values())
        if counted != line["counts"][name]:
            what = f"{name} of the step's records, against what the run counted then,"
            wanted = str(line["counts"][name])
            audit.find(Finding("covered", what, step.step, got=str(counted), expected=wanted))


def _judge_mismatch(audit: Audit, step: StepEvidence, cell: Cell, threshold: float) -> None:
    values = dict(zip(COUNTERS, step.cells[cell]))
    replayed, mismatch = values["rows_replayed"], values["rows_mismatch"]
    if sum(values[n] for n in _ROWS) != replayed:
        what = "rows that agree, overlap and mismatch"
        got = str(sum(values[n] for n in _ROWS))
        ranks = tuple(sorted(step.of_rank[cell]))
        audit.find(_at("covered", what, step, cell, ranks, got, str(replayed)))
    if mismatch > threshold * replayed:
        got, most = f"{mismatch} of {replayed}", f"at most {threshold:g} of them"
        what = "rows that share no expert with the trainer's own choice"
        ranks = tuple(sorted(step.of_rank[cell]))
        audit.find(_at("agreement", what, step, cell, ranks, got, most))


def _expectation(step: StepEvidence) -> StepExpectation:
    """What the rollout side recorded of the step, as the run judged by it."""
    line = step.line

    def by_layer(name: str) -> dict[int, int]:
        return {int(n): v for n, v in line[name].items()}

    return StepExpectation(
        step.step,
        {int(n): int(f, 16) for n, f in line["expected_fingerprints"].items()},
        rows_replayed=by_layer("expected_rows_replayed"),
        rows_filled=by_layer("expected_rows_filled"),
        num_calls={
            p: {s: {int(n): c for n, c in of.items()} for s, of in stages.items()}
            for p, stages in line["expected_calls"].items()
        },
    )


def _add(sums: _Sums, step: StepEvidence, expectation: StepExpectation) -> None:
    line = step.line
    sums.num_steps += 1
    sums.world_size = max(sums.world_size, line["world_size"])
    sums.calls_expected += sum(
        c for s in expectation.num_calls.values() for of in s.values() for c in of.values()
    )
    sums.rows_expected += sum(expectation.rows_replayed.values())
    for cell, values in step.cells.items():
        # Python's integers: the sums of a long run of damaged records may pass 64 bits
        whole = np.array([v if i != 1 else 0 for i, v in enumerate(values)], dtype=object)
        sums.table[cell] = sums.table.get(cell, 0) + whole
    for name, value in line["agreement"].items():
        if name.startswith("chance_"):
            sums.chance[name] = value


def _silent_ranks(files: EvidenceFiles, step: StepEvidence) -> list[int]:
    """Who could have made the calls that are missing: ranks without a record of this step.

    A rank whose file has not one record may hold no layer with experts: it is named only where no
    other rank is silent.
    """
    silent = [rank for rank in range(step.line["world_size"]) if rank not in step.ranks]
    known = [rank for rank in silent if rank in files.speakers or rank not in files.rank_files]
    return known or silent


def _suspects(step: StepEvidence, cell: Cell, what: str) -> tuple[int, ...]:
    """The ranks that a failure points at: at best the one, at worst all that hold the layer."""
    if (cell, what) in step.at_fault:
        return tuple(sorted(step.at_fault[cell, what]))
    of_rank = step.of_rank.get(cell, {})
    if what == "num_calls" and of_rank:
        usual = sorted(calls for calls, _ in of_rank.values())[len(of_rank) // 2]
        odd = [rank for rank, (calls, _) in of_rank.items() if calls != usual]
        return tuple(sorted(odd or of_rank))
    if what == "fingerprint":
        wrong: list[int] = []
        for place in step.line.get("places", []):
            own = sum(of_rank.get(rank, (0, 0))[1] for rank in place["ranks"]) % (1 << 64)
            if own != int(place["fingerprints"].get(str(cell[2]), "0x0"), 16):
                wrong += [rank for rank in place["ranks"] if rank in of_rank]
        if wrong:
            return tuple(sorted(wrong))
        # every pass replays the same routes, so a rank whose passes differ is the one
        _, _, layer = cell
        seen: dict[int, set[int]] = {}
        for (_, _, number), ranks in step.of_rank.items():
            if number == layer:
                for rank, (_, fingerprint) in ranks.items():
                    seen.setdefault(rank, set()).add(fingerprint)
        odd = [rank for rank, values in seen.items() if len(values) > 1]
        return tuple(sorted(odd or seen))
    return tuple(sorted(of_rank))


def _judge_files(audit: Audit, files: EvidenceFiles, sums: _Sums, run_dir: Path) -> None:
    """What the files themselves show: missing, cut, broken, steps without a verdict."""
    world = sums.world_size or len(files.rank_files)
    for rank in sorted(set(range(world)) - files.rank_files.keys()):
        audit.find(Finding("covered", f"rank_{rank:05d}.jsonl is missing", ranks=(rank,)))
    for rank, steps in sorted(sums.silent.items()):
        if rank in files.rank_files:
            none = "" if rank in files.speakers else ", nor of any other"
            text = f"no record of steps {ranges(steps)}{none}"
            if f"rank_{rank:05d}.jsonl" in files.truncated:
                text += ", and its file ends within a line: it was cut"
            audit.find(Finding("covered", text, step=min(steps), ranks=(rank,)))
    for name, texts in files.broken.first.items():
        for text in texts:
            audit.find(Finding("covered", text))
        if more := files.broken.more(name):
            audit.find(Finding("covered", f"{name}: {more} more broken lines"), count=more)
    for rank, count in sorted(files.out_of_order.items()):
        audit.find(Finding("covered", f"{count} records out of their order", ranks=(rank,)))
    audit.notes += [f"{n} ends within a line: its writer was stopped" for n in files.truncated]
    judged = set(files.judged_steps)
    for attempt, steps in files.unfinished.items():
        open_steps = sorted(steps)
        before = files.judged_in(attempt)
        crash = len(steps) == 1 and open_steps[0] > max(before, default=-1)
        if crash:
            text = f"step {open_steps[0]} was not finished (start {attempt}): it is not judged"
            audit.notes.append(text)
        else:
            missing = f"{STEPS_FILE} has no verdict for steps {ranges(open_steps)}"
            audit.find(Finding("covered", missing, step=open_steps[0]))
    if judged:
        gaps = [(a + 1, b - 1) for a, b in pairwise(files.judged_steps) if b > a + 1]
        trained = sorted(_trained_steps(audit, run_dir) - judged)
        trained = [step for step in trained if not any(a <= step <= b for a, b in gaps)]
        if gaps:
            # as runs: one damaged number makes a gap that is too long to list
            shown = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in gaps[:6])
            text = f"no evidence of steps {shown}, between others that have it"
            audit.find(Finding("covered", text, step=gaps[0][0]))
        if trained:
            text = f"steps {ranges(trained)} were trained ({METRICS_FILE}) and have no evidence"
            audit.find(Finding("covered", text, step=trained[0]))
        if min(judged) > 0 and not trained:
            audit.notes.append(f"evidence begins at step {min(judged)}: the run was resumed there")
    if files.superseded:
        steps = sorted({step for _, step in files.superseded})
        audit.notes.append(
            f"{len(files.attempts)} starts in one directory: steps {ranges(steps)} were trained"
            " again, and the latest time counts"
        )


def _conclude(audit: Audit, files: EvidenceFiles, sums: _Sums) -> None:
    total = sum(sums.table.values(), np.zeros(len(COUNTERS), dtype=object))
    counts = dict(zip(COUNTERS, total.tolist()))
    del counts["fingerprint"]
    audit.numbers = {
        "steps": sums.num_steps,
        "first_step": min(files.judged_steps, default=None),
        "last_step": max(files.judged_steps, default=None),
        "ranks": len(files.rank_files),
        "calling_ranks": sorted(files.speakers),
        "world_size": sums.world_size or None,
        "starts": len(files.attempts),
        "records": files.num_records,
        "calls_expected": sums.calls_expected,
        "mismatch_threshold": max(sums.thresholds, default=None),
        **counts,
    }
    _agreement(audit, sums)
    if audit.num_findings:
        audit.verdict = FAILED
    elif not files.judged_steps:
        audit.reason = "the run ended before its first step was judged"
    elif not sums.rows_expected:
        audit.reason = "not one row with recorded routes: there was nothing to replay"
    else:
        audit.verdict = PASSED
    for claim, value in audit.claims.items():
        if value != FAILED and sums.rows_expected and counts["rows_replayed"]:
            audit.claims[claim] = PASSED


def _agreement(audit: Audit, sums: _Sums) -> None:
    """Shares over the run, in the old-log-prob pass, beside chance and the misaligned controls."""
    layers = {c[2]: v for c, v in sums.table.items() if c[:2] == ("old_log_prob", STAGES[0])}
    total = sum(layers.values(), np.zeros(len(COUNTERS), dtype=object))
    rows = int(total[_COLUMN["rows_replayed"]])
    if not rows:
        return
    for name in COUNTERS:
        if name in _ROWS or name.startswith("control_"):
            audit.agreement[name.removeprefix("rows_")] = float(total[_COLUMN[name]]) / rows
    audit.agreement.update(sums.chance)
    for layer, values in sorted(layers.items()):
        replayed = int(values[_COLUMN["rows_replayed"]])
        if replayed:
            audit.layer_agreement[layer] = float(values[_COLUMN["rows_equal"]]) / replayed
    control = max(v for n, v in audit.agreement.items() if n.startswith("control_"))
    if audit.agreement["equal"] <= control:
        audit.notes.append(
            f"the trainer's own choice agrees with {audit.agreement['equal']:.1%} of the rows, and"
            f" with {control:.1%} under a deliberate misalignment: are weights and alignment right?"
        )


def _at(
    claim: str,
    what: str,
    step: StepEvidence,
    cell: Cell,
    ranks: tuple[int, ...],
    got: str = "",
    expected: str = "",
) -> Finding:
    return Finding(claim, what, step.step, ranks, *cell, got, expected)


def _recorded_text(f: dict[str, Any]) -> str:
    place = f"{f.get('replay_pass')}/{f.get('stage')} layer {f.get('layer_number')}"
    return f"{place}: {f.get('what')} is {f.get('got')}, expected {f.get('expected')}"


def _config(run_dir: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: section for name, section in config.items() if isinstance(section, dict)}


def _why_nothing(run_dir: Path, config: dict[str, Any]) -> str:
    replay = config.get("replay", {})
    if config and not replay.get("use_rollout_routing_replay"):
        return "the run did not use R3 (--use-rollout-routing-replay)"
    checked = config.get("trainer", {}).get("ci_test") or replay.get("enable_r3_correctness_check")
    if config and not checked:
        return "the run's R3 check was off (--enable-r3-correctness-check)"
    if config:
        return f"{EVIDENCE_DIR}/ holds no records: the run ended before its first step was judged"
    return f"no {EVIDENCE_DIR}/ and no config.toml in {run_dir}: is it a run directory?"


def _trained_steps(audit: Audit, run_dir: Path) -> set[int]:
    try:
        return {m["step"] for m in read_metrics(run_dir)}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, RecursionError) as error:
        audit.notes.append(
            f"{METRICS_FILE} cannot be read, so trained steps are not known: {error}"
        )
        return set()


def _signed(value: int) -> np.int64:
    return np.uint64(value % (1 << 64)).astype(np.int64)

"""Run directories with evidence as a run writes them: small, and to be damaged by tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import Audit
from r3train.proof.custody_verdict import CustodyRecord, judge_custody
from r3train.proof.step_verdict import (
    expected_calls,
    judge_step,
    Place,
    step_line,
    StepExpectation,
    StepTotals,
    StreamExpectation,
)
from r3train.proof.recheck_verdict import judge_recheck, Noise, RecheckRecord, RowsApart
from r3train.proof.served_verdict import (
    CanaryNoise,
    Coverage,
    Difference,
    Earlier,
    judge_served,
    ServedRecord,
    statistics_again,
)
from r3train.proof.suspicion import Statistic, Suspicions
from r3train.observe.metrics import MetricsWriter
from r3train.proof.writer import EvidenceWriter, rank_file
from r3train.types import is_checked, ReplayEvidence, RouteShape

PASSES = ("old_log_prob", "train")
LAYERS = (1, 2, 3)
ROWS = 100
CURRENT_ROWS = {"old_log_prob": 50, "train": 30}
SHAPE = RouteShape(3, 2, 8)
CONFIG = """[replay]
use_rollout_routing_replay = true
enable_r3_correctness_check = true
r3_mismatch_threshold = 0.02
"""


def record(step: int, rank: int, replay_pass: str, layer: int, **changes) -> ReplayEvidence:
    """One correct call of a rank; its fingerprint depends on step, rank and layer only.

    Of 100 rows 50 are of the actor's own weights in the old-log-prob pass, 30 in the train pass, none of
    which mismatches.
    """
    values = dict(
        step=step,
        rank=rank,
        replay_pass=replay_pass,
        stream="routes",
        stage="replay_forward",
        vp_stage=0,
        microbatch_id=0,
        layer_number=layer,
        num_rows=ROWS + 10,
        rows_replayed=ROWS,
        rows_filled=4,
        rows_padding=6,
        rows_native=0,
        duplicate_rows=0,
        topk=2,
        replay_idx_sum=777,
        map_sum=2 * (ROWS + 10),
        fingerprint=fingerprint(step, rank, layer),
        rows_equal=90,
        rows_overlap=9,
        rows_mismatch=1,
        rows_recompute_differ=0,
        control_token_minus=20,
        control_token_plus=21,
        control_layer_minus=3,
        control_layer_plus=4,
        rows_current=CURRENT_ROWS.get(replay_pass, 0),
        rows_current_equal=CURRENT_ROWS.get(replay_pass, 0),
        rows_current_mismatch=0,
    )
    return ReplayEvidence(**{**values, **changes})


def with_choice(r: ReplayEvidence, equal: int, mismatch: int = 0, **changes) -> ReplayEvidence:
    """A call in whose 100 rows the trainer's own choice is another; as many current rows agree as can."""
    changes |= {"rows_equal": equal, "rows_overlap": ROWS - equal - mismatch}
    current = min(r.rows_current_equal, equal)
    return replace(r, rows_mismatch=mismatch, rows_current_equal=current, **changes)


def rows_apart(differ: dict[int, int] | None = None, rows: int = ROWS) -> RowsApart:
    """Rows of three layers, computed twice; differ: those with other experts, 0 in a layer that is not named."""
    return RowsApart(rows, dict.fromkeys(LAYERS, 0) | (differ or {}))


NOISE = Noise(rows_apart(rows=5000), rows_apart(rows=800), 2000, 2e-7, 1e-6)


def comparison(step: int, **changes) -> RecheckRecord:
    """A right sample of 100 decoded and 20 prefilled rows in each layer, rechecked."""
    values = dict(
        step=step,
        sample_id=8 * step,
        part="whole",
        server=0,
        weight_version=step,
        held_version=step,
        first_row=0,
        decoded=rows_apart(),
        prefilled=rows_apart(rows=20),
        num_log_probs=60,
        log_prob_off=3e-7,
        log_prob_off_max=1e-6,
        noise=NOISE,
    )
    return RecheckRecord(**{**values, **changes})


def canaries(step: int, server: int = 0, **changes) -> ServedRecord:
    """All canaries of a sound server after the update to a step's weights."""
    none, moved = Difference(0.0, 0.0, 0, 1000), Difference(0.1, 0.01, 50, 1000)
    gap_mean = changes.setdefault("gap_mean", 4e-7)
    values = dict(
        step=step,
        server=server,
        num_texts=4,
        num_tokens=1020,
        num_decoded=16,
        early_cached=0,
        warm_evicted=0,
        warm_cached_rows=0,
        warm=none,
        not_finite=0,
        earlier=[Earlier(step - 1, moved, 1.0)] if step else [],
        gap_max=3e-6,
        rows=4000,
        rows_left=0,
        coverage=Coverage(24, 24, 200, 256),
        noise=CanaryNoise(none, none, 4e-7, 4e-7, 3e-6, 0.0, 1e-6, 0.0, 16000, 0),
        # its sums are added up where it is written
        statistics=[Statistic("BOUND", server, gap_mean, None, 0.0)],
        limit=1.0,
    )
    return ServedRecord(**{**values, **changes})


def records_of(step: int, rank: int, microbatches: int = 1) -> list[ReplayEvidence]:
    """All calls of a rank in a step, in their order."""
    places = [(p, m, layer) for p in PASSES for m in range(microbatches) for layer in LAYERS]
    return [
        record(
            step,
            rank,
            p,
            layer,
            microbatch_id=m,
            fingerprint=fingerprint(step + 1000 * m, rank, layer),
        )
        for p, m, layer in places
    ]


def fingerprint(step: int, rank: int, layer: int) -> int:
    return (0x9E3779B97F4A7C15 * (step * 64 + rank * 8 + layer + 1)) % (1 << 64)


def write_run(
    run_dir: Path,
    steps: range = range(3),
    *,
    ranks: int = 2,
    attempt: str = "2026-01-01T00:00:00Z",
    change: Callable[[ReplayEvidence], ReplayEvidence] | None = None,
    silent: tuple[int, ...] = (),
    rechecked: Callable[[int], list[RecheckRecord]] | None = None,
    served: Callable[[int], list[ServedRecord]] | None = None,
    custody: Callable[[int], list[CustodyRecord]] | None = None,
    summed: bool = False,
    microbatches: int = 1,
    check_interval: int = 1,
    limit: float = 1.0,
    calibrating: int = 0,
) -> Path:
    """Write a run with the check on; ``change`` is what the trainer really did to each call.

    silent: ranks that hold no layer with experts.  rechecked: comparisons of a step with samples that
    were rechecked; None: there was to be none.  served: the canaries of a step's weights.  custody: the sessions of agents that a
    step trained.  summed: as with ``--r3-evidence summed``.
    microbatches: calls of each pass and layer on a rank.  check_interval: that of --r3-check-interval.
    limit, calibrating: of ``Suspicions``; the first suspect step fails unless told otherwise.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(CONFIG)
    writers = [EvidenceWriter(run_dir, rank, attempt) for rank in range(ranks)]
    suspicions = Suspicions(limit, calibrating)
    server_suspicions = Suspicions(limit)
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step in steps:
            canaries = None
            if served is not None:
                read = [
                    replace(r, statistics=statistics_again(r, server_suspicions), limit=limit)
                    for r in served(step)
                ]
                canaries = judge_served(read)
                writers[0].write_served(read)
            if canaries is not None:
                if canaries.failures:  # the run ends before the step
                    break
            if step != steps[0] and not is_checked(step, check_interval):
                metrics.write(step, {"rollout/reward_mean": 0.1, "r3/unchecked": True})
                continue
            totals, rank_records = StepTotals(SHAPE), {}
            for rank, writer in enumerate(writers):
                records = [] if rank in silent else records_of(step, rank, microbatches)
                records = [change(r) if change else r for r in records]
                rank_records[rank] = records
                for call in records:
                    totals.add(call)
            speaking = set(range(ranks)) - set(silent)
            expectation = expectation_of(step, speaking, microbatches)
            verdict = judge_step(
                totals, expectation, SHAPE, mismatch_threshold=0.02, suspicions=suspicions
            )
            for rank, writer in enumerate(writers):
                writer.write(rank_records[rank], as_sums=summed and verdict.passed)
            if rechecked is not None:
                writers[0].write_recheck(rechecked(step))
                again = judge_recheck(rechecked(step), 0, suspicions)
                verdict = replace(verdict, recheck=again)
            sessions = custody(step) if custody is not None else []
            writers[0].write_custody(sessions)
            verdict = replace(verdict, custody=judge_custody(sessions), served=canaries)
            line = step_line(
                verdict,
                expectation,
                SHAPE,
                world_size=ranks,
                mismatch_threshold=0.02,
                calibrating=calibrating,
                check_interval=check_interval,
            )
            writers[0].write_step(line)
            metrics.write(step, {"rollout/reward_mean": 0.1, "r3/passed": verdict.passed})
            if not verdict.passed:  # as a run does
                break
    for writer in writers:
        writer.close()
    return run_dir


def expectation_of(step: int, ranks: Collection[int], microbatches: int = 1) -> StepExpectation:
    """The rollout side's totals of a step in which these ranks call every router."""
    calls = len(ranks) * microbatches
    current = {p: CURRENT_ROWS[p] * calls for p in PASSES}
    each = {
        rank: {
            layer: sum(fingerprint(step + 1000 * m, rank, layer) for m in range(microbatches))
            % (1 << 64)
            for layer in LAYERS
        }
        for rank in ranks
    }
    routes = StreamExpectation(
        fingerprints={
            layer: sum(local[layer] for local in each.values()) % (1 << 64) for layer in LAYERS
        },
        rows_replayed=dict.fromkeys(LAYERS, ROWS * calls),
        rows_filled=dict.fromkeys(LAYERS, 4 * calls),
        rows_without_choice=4 * calls,
        rows_current=current,
        calls=expected_calls(LAYERS, calls, PASSES),
    )
    return StepExpectation(
        step=step,
        streams={"routes": routes},
        places=[Place([rank], {"routes": local}) for rank, local in each.items()],
    )


def edit(run_dir: Path, file: int | str, change: Callable[[list[dict]], list[dict]]) -> None:
    """Rewrite a rank's file, or another one of the run, through ``change`` of its lines."""
    path = rank_file(run_dir, file) if isinstance(file, int) else run_dir / file
    records = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def audit_of_one_start(run_dir: Path) -> Audit:
    """Audit a run that was started once; nothing of the start that counts may be accepted."""
    audit = audit_run(run_dir)
    assert audit_run(run_dir, accept_superseded=True).findings == audit.findings
    return audit

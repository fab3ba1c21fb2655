"""--debug-rollout-only: rollouts are generated, scored and dumped, and nothing is trained."""

from __future__ import annotations

import time
from pathlib import Path

from r3train.config import RunConfig
from r3train.loop.run_state import WatchedSource
from r3train.loop.rank_zero import RankZero
from r3train.loop.replay_source import dump_rollout
from r3train.loop.prepare import train_samples
from r3train.loop.step_metrics import report_rollout
from r3train.loop.stop import StopRequested, StopSignal


def generate_only(config: RunConfig, run_dir: Path, rank_zero: RankZero, stop: StopSignal) -> None:
    """Generate every rollout with the weights that the servers start with; on rank 0 only."""
    rollout, display = config.rollout, rank_zero.display

    def dump(rollout_id: int, groups) -> None:
        dump_rollout(run_dir / "rollouts", rollout_id, groups, rollout.rollout_temperature)

    source = WatchedSource(rank_zero.rollouts.start_producer(), stop, dump)
    counts = source.stats()
    for rollout_id in range(rollout.num_rollout):
        began = time.monotonic()
        try:
            groups = rank_zero.next_groups(source, rollout_id, rollout.rollout_batch_size)
        except StopRequested as request:
            display.note(f"stopped by {request} after {rollout_id} rollouts")
            return
        before, counts = counts, source.stats()
        samples, stats = train_samples(groups, config.algorithm, rollout.rollout_max_response_len)
        metrics = report_rollout(
            rollout_id, samples, stats, config, rank_zero.metrics, counts, before
        )
        step_s = time.monotonic() - began
        metrics |= rank_zero.servers.fault_counts()
        metrics |= {
            "perf/rollout_wait_s": step_s,
            "perf/step_s": step_s,
            "perf/tokens_per_s": metrics["rollout/tokens"] / step_s,
        }
        rank_zero.metrics.write(rollout_id, metrics)
        display.step_line({**metrics, "step": rollout_id})
    stop.finished = True

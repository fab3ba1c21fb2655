"""Traces of some steps on some ranks: torch.profiler, and CUDA's history of memory."""

from __future__ import annotations

from pathlib import Path

import torch

from r3train.config.run import RunSection

PROFILE_DIR = "profile"
# allocations and releases that are kept, as Megatron keeps them
_MEMORY_ENTRIES = 100_000


class StepProfiler:
    """Profiles the rollouts from profile_step_start up to, not including, profile_step_end.

    Files are written once, when the range or the run ends.  On ranks that are not in profile_ranks it
    does nothing.
    """

    def __init__(self, run: RunSection, run_dir: Path, rank: int) -> None:
        self._run = run
        self._directory = run_dir / PROFILE_DIR
        self._rank = rank
        switched_on = run.use_pytorch_profiler or run.record_memory_history
        self._profiles_rank = switched_on and rank in run.profile_ranks
        self._running = False
        self._profiler: torch.profiler.profile | None = None

    def at(self, rollout_id: int) -> None:
        """Begin or end, as the settings say, before a rollout is taken."""
        in_range = self._run.profile_step_start <= rollout_id < self._run.profile_step_end
        if in_range and self._profiles_rank and not self._running:
            self._begin()
        elif not in_range:
            self.close()

    def _begin(self) -> None:
        if self._run.use_pytorch_profiler:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
        if self._run.record_memory_history:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_ENTRIES)
        self._running = True

    def close(self) -> None:
        """End the range and write its files. Idempotent."""
        if not self._running:
            return
        self._running = False
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._profiler is not None:
            self._profiler.stop()
            trace = self._directory / f"trace_rank_{self._rank:05d}.json.gz"
            self._profiler.export_chrome_trace(str(trace))
            self._profiler = None
        if self._run.record_memory_history:
            snapshot = self._directory / f"memory_rank_{self._rank:05d}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)

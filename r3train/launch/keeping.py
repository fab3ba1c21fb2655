"""The keeper of a run, built from a checked job: checkpoints, stops, bad steps."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r3train.launch.job import Job
from r3train.launch.resume import ResumePoint, run_facts
from r3train.loop.keeper import Keeper
from r3train.loop.stop import StopSignal
from r3train.trainer.megatron import checkpoint
from r3train.trainer.megatron.actor import MegatronActor


def build_keeper(
    job: Job,
    actor: MegatronActor,
    run_dir: Path,
    stop: StopSignal,
    note: Callable[[str], None],
    resume: ResumePoint,
) -> Keeper:
    """Build this rank's keeper; ``note`` shows a line to people."""
    config = job.config
    checkpointer: Any = None
    if config.checkpoint.save is not None:
        checkpointer = checkpoint.Checkpointer(
            actor,
            config.checkpoint,
            resumed_at=resume.next_rollout_in(config.checkpoint.save),
        )
        if config.faults.plant_fault == "disk_full":
            checkpointer = _FullDisk(checkpointer)
    return Keeper(
        config,
        run_dir,
        run_facts=run_facts(job),
        prompt_file=job.prompt_file,
        stop=stop,
        checkpointer=checkpointer,
        note=note,
    )


class _FullDisk:
    """--plant-fault disk_full: from the second save on, the disk is full half-way through."""

    def __init__(self, inner: checkpoint.Checkpointer):
        self._inner = inner
        self._saves = 0

    def save(self, next_rollout_id: int, facts: dict, write_extra: Callable | None = None) -> None:
        self._saves += 1

        def fails(directory: Path) -> None:
            if write_extra is not None:
                write_extra(directory)
            if self._saves > 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        self._inner.save(next_rollout_id, facts, fails)

    def poll(self) -> None:
        self._inner.poll()

    def finish(self) -> None:
        self._inner.finish()

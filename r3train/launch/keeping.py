"""The keeper of a run, built from a checked job: checkpoints, stops, bad steps."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r3train.launch.job import Job
from r3train.launch.resume import ResumePoint, run_facts
from r3train.loop.bad_steps import BadSteps
from r3train.loop.keeper import Keeper, KeeperSettings
from r3train.loop.stop import StopSignal
from r3train.trainer.megatron import checkpoint
from r3train.trainer.megatron.actor import MegatronActor


def build_keeper(
    job: Job,
    actor: MegatronActor,
    run_dir: Path,
    stop: StopSignal,
    tell: Callable[[str], None],
    point: ResumePoint,
) -> Keeper:
    """The keeper of this rank; ``tell`` shows a line to people, ``point`` is where the run begins."""
    config = job.config
    checkpointer: Any = None
    if config.checkpoint.save is not None:
        checkpointer = checkpoint.Checkpointer(
            actor,
            config.checkpoint.save,
            asynchronous=config.checkpoint.async_save,
            keep_last=config.checkpoint.save_keep_last,
            resumed_at=point.rollouts_in(config.checkpoint.save),
        )
        if config.faults.plant_fault == "disk_full":
            checkpointer = _FullDisk(checkpointer)
    return Keeper(
        KeeperSettings(
            run_dir=run_dir,
            save_interval=config.checkpoint.save_interval,
            dump_rollouts=config.checkpoint.dump_rollouts,
            facts={"run": run_facts(job)},
            config_toml=config.to_toml(),
            prompts_changed=job.prompt_file.changed,
        ),
        stop=stop,
        bad_steps=BadSteps(config.faults.max_bad_steps, run_dir),
        checkpointer=checkpointer,
        tell=tell,
    )


class _FullDisk:
    """--plant-fault disk_full: from the second save on, the disk is full half-way through."""

    def __init__(self, inner: checkpoint.Checkpointer):
        self._inner = inner
        self._saves = 0

    def save(self, num_rollouts: int, facts: dict, write_extra: Callable | None = None) -> None:
        self._saves += 1

        def fails(directory: Path) -> None:
            if write_extra is not None:
                write_extra(directory)
            if self._saves > 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        self._inner.save(num_rollouts, facts, fails)

    def poll(self) -> None:
        self._inner.poll()

    def finish(self) -> None:
        self._inner.finish()

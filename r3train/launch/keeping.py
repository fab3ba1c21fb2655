"""The keeper of a run, built from a checked job: checkpoints, stops, bad steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from r3train.launch.job import Job
from r3train.launch.resume import ResumePoint, run_facts
from r3train.loop.keeper import Keeper
from r3train.loop.stop import StopSignal
from r3train.trainer.megatron import checkpoint
from r3train.trainer.megatron.actor import MegatronActor
from r3train.types import RolloutSample


def build_keeper(
    job: Job,
    actor: MegatronActor,
    run_dir: Path,
    stop: StopSignal,
    note: Callable[[str], None],
    resume: ResumePoint,
    with_routes: Callable[[RolloutSample], RolloutSample],
) -> Keeper:
    """Build this rank's keeper; for ``note`` and ``with_routes`` see ``Keeper``."""
    config = job.config
    checkpointer = None
    if config.checkpoint.save is not None:
        checkpointer = checkpoint.Checkpointer(
            actor,
            config.checkpoint,
            resumed_at=resume.next_rollout_in(config.checkpoint.save),
        )
    return Keeper(
        config,
        run_dir,
        run_facts=run_facts(job),
        prompt_file=job.prompt_file,
        stop=stop,
        checkpointer=checkpointer,
        note=note,
        with_routes=with_routes,
    )

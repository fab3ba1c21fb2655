"""Actor, transport of routes and run state of one rank, built from a checked job.

Import this module after ``prepare_device()``: it imports megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.hf_checkpoint import NamedTensors, export_checkpoint
from r3train.launch.job.checked_job import Job
from r3train.launch.job.resume import ResumePoint, run_facts, sample_facts
from r3train.loop.route_transport import Routes, RoutesOnRank0
from r3train.loop.run_state import RunState
from r3train.loop.stop import StopSignal
from r3train.peft_files import saved_forms, write_adapter
from r3train.route_stores.stores import RouteStores
from r3train.trainer.megatron import checkpoint
from r3train.trainer.megatron.actor import MegatronActor
from r3train.trainer.megatron.topology import init_model_parallel
from r3train.types import RolloutSample


def build_actor(job: Job, device: torch.device, resume: ResumePoint) -> MegatronActor:
    """Build this rank's actor.  It starts from the HF checkpoint, or from ``resume.checkpoint``."""
    config = job.config
    topology = init_model_parallel(config.parallel, config.trainer.seed)
    actor = MegatronActor(config, job.hf, topology, device)
    if config.algorithm.needs_reference and not config.reference_is_base:
        actor.load_reference(config.ref_checkpoint)
    if config.algorithm.holds_teacher:
        actor.load_teacher(config.model.opd_teacher_load)
    if resume.checkpoint is not None:
        checkpoint.load_checkpoint(actor, resume.checkpoint, model_only=resume.model_only)
    return actor


def build_routes(config: RunConfig, hf: HfModelFacts) -> Routes:
    """Build this rank's part; raises ValueError if leaders could not reach the servers."""
    if config.replay.route_stores:
        return RouteStores(config, hf.route_shape, hf.moe_layer_numbers)
    if config.replay.use_rollout_routing_replay:
        return RoutesOnRank0(hf.route_shape, hf.moe_layer_numbers)
    return RoutesOnRank0(None, ())


def build_run_state(
    job: Job,
    actor: MegatronActor,
    run_dir: Path,
    stop: StopSignal,
    note: Callable[[str], None],
    resume: ResumePoint,
    with_routes: Callable[[RolloutSample], RolloutSample],
) -> RunState:
    """Build the part that saves checkpoints and ends the run on a signal or after bad steps.

    ``note`` shows a line on rank 0's terminal.  For ``with_routes`` see ``RunState``.
    """
    config = job.config
    checkpointer = None
    if config.checkpoint.save is not None:
        checkpointer = checkpoint.Checkpointer(
            actor,
            config.checkpoint,
            resumed_at=resume.next_rollout_in(config.checkpoint.save),
        )
    return RunState(
        config,
        run_dir,
        run_facts=run_facts(job),
        sample_facts=sample_facts(job),
        prompt_file=job.prompt_file,
        stop=stop,
        checkpointer=checkpointer,
        note=note,
        with_routes=with_routes,
        export=partial(export_hf, job, actor) if config.checkpoint.exports_often else None,
    )


def export_hf(job: Job, actor: MegatronActor, rollout_id: int) -> None:
    """Write the actor's weights to --save-hf in the forms that were asked for; a collective.

    rollout_id: the number of rollouts that they were trained on.
    """
    config = job.config
    base, directory = config.model.hf_checkpoint, config.checkpoint.hf_directory(rollout_id)
    merged, adapter = saved_forms(config.lora, job.hf)
    if merged:
        with _on_rank_0(actor, actor.hf_weights()) as weights:
            if weights is not None:
                export_checkpoint(weights, directory, hf_checkpoint=base)
    if adapter:
        with _on_rank_0(actor, actor.adapter_weights()) as factors:
            if factors is not None:
                place = directory / "adapter" if merged else directory
                write_adapter(factors, place, config.lora, job.hf)


@contextmanager
def _on_rank_0(actor: MegatronActor, whole: NamedTensors) -> Iterator[NamedTensors | None]:
    """Yield a collective's whole tensors on rank 0; the other ranks drain theirs and get None."""
    if actor.topology.rank == 0:
        yield whole
        return
    for _ in whole:
        raise AssertionError("only rank 0 holds whole tensors")
    yield None

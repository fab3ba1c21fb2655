"""Every rank's side of the training, built from a checked job.

Import this module after ``cpu_device.prepare_device()``: it imports megatron-core.
"""

from __future__ import annotations

from pathlib import Path

import torch

from r3train.launch.job import Job
from r3train.launch.resume import ResumePoint
from r3train.trainer.megatron import checkpoint
from r3train.trainer.megatron.actor import MegatronActor
from r3train.trainer.megatron.topology import init_model_parallel
from r3train.hf_checkpoint import export_checkpoint


def build_actor(job: Job, device: torch.device, resume: ResumePoint) -> MegatronActor:
    """The actor of this rank with what it starts from: the HF checkpoint, or one of ours."""
    config, algorithm = job.config, job.config.algorithm
    topology = init_model_parallel(config.parallel, config.trainer.seed)
    actor = MegatronActor(
        topology=topology,
        device=device,
        hf=job.hf,
        model=config.model,
        parallel=config.parallel,
        trainer=config.trainer,
        algorithm=algorithm,
        temperature=config.rollout.rollout_temperature,
        total_steps=config.rollout.num_rollout * config.steps_per_rollout,
        use_routing_replay=config.replay.use_rollout_routing_replay,
        enable_r3_correctness_check=config.replay.enable_r3_correctness_check,
    )
    if algorithm.needs_reference:
        actor.load_reference(config.ref_checkpoint)
    if resume.checkpoint is not None:
        checkpoint.load_checkpoint(actor, resume.checkpoint, model_only=resume.model_only)
    return actor


def export_hf(actor: MegatronActor, hf_checkpoint: Path, directory: Path) -> None:
    """Write the actor's weights as a Hugging Face checkpoint; a collective."""
    weights = actor.hf_weights()
    if actor.topology.rank == 0:
        export_checkpoint(weights, directory, hf_checkpoint=hf_checkpoint)
    else:
        for _ in weights:
            raise AssertionError("only rank 0 holds whole tensors")

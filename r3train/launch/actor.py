"""Every rank's side of the training, built from a checked job.

Import this module after ``cpu_device.prepare_device()``: it imports megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from r3train.config.trainer import TrainerSection
from r3train.launch.job import Job
from r3train.trainer.megatron import checkpoint
from r3train.trainer.megatron.actor import MegatronActor
from r3train.trainer.megatron.forward_step import LossSettings
from r3train.trainer.megatron.topology import init_model_parallel


def resume_point(trainer: TrainerSection) -> int:
    """Rollouts that the checkpoint under --load was trained on, 0 without one."""
    return checkpoint.num_rollouts_of(trainer.load) if trainer.load is not None else 0


def build_actor(job: Job, device: torch.device) -> MegatronActor:
    """The actor of this rank with the weights it starts from: the HF checkpoint's, or --load's."""
    config, algorithm = job.config, job.config.algorithm
    topology = init_model_parallel(config.parallel, config.trainer.seed)
    actor = MegatronActor(
        topology=topology,
        device=device,
        hf=job.hf,
        model=config.model,
        parallel=config.parallel,
        trainer=config.trainer,
        loss=LossSettings(
            temperature=config.rollout.rollout_temperature,
            eps_clip=algorithm.eps_clip,
            eps_clip_high=algorithm.clip_high,
            kl_loss_coef=algorithm.kl_loss_coef,
            entropy_coef=algorithm.entropy_coef,
            use_tis=algorithm.use_tis,
            tis_clip=algorithm.tis_clip,
            tis_clip_low=algorithm.tis_clip_low,
        ),
        total_steps=config.rollout.num_rollout * config.steps_per_rollout,
        use_routing_replay=config.replay.use_rollout_routing_replay,
        enable_r3_correctness_check=config.replay.enable_r3_correctness_check,
    )
    if algorithm.needs_reference:
        actor.load_reference(config.ref_checkpoint)
    if config.trainer.load is not None:
        checkpoint.load_checkpoint(actor, config.trainer.load)
    if config.replay.plant_bug == "bypass":
        actor.replay.uninstall()
    return actor


def saver(actor: MegatronActor, trainer: TrainerSection) -> Callable[[int], None] | None:
    """What saves a checkpoint after n rollouts, or None without --save."""
    directory = trainer.save
    if directory is None:
        return None
    return lambda num_rollouts: checkpoint.save_checkpoint(actor, directory, num_rollouts)

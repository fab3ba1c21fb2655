"""Megatron's optimizer and learning-rate schedule from our configuration."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from r3train.config.trainer import TrainerSection


def build_optimizer(
    trainer: TrainerSection,
    chunks: list[torch.nn.Module],
    *,
    bf16: bool,
    use_distributed_optimizer: bool,
) -> MegatronOptimizer:
    """Adam(W) or SGD over the chunks' DDP buffers, in float32 main weights under bf16."""
    config = OptimizerConfig(
        optimizer=trainer.optimizer,
        lr=trainer.lr,
        min_lr=trainer.min_lr,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        sgd_momentum=0.0,
        clip_grad=trainer.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, chunks)


def build_scheduler(
    trainer: TrainerSection, optimizer: MegatronOptimizer, total_steps: int
) -> OptimizerParamScheduler:
    """Learning rate over optimizer steps: linear warm-up, then the configured decay to the end."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=trainer.lr,
        min_lr=trainer.min_lr,
        lr_warmup_steps=trainer.lr_warmup_iters,
        lr_decay_steps=max(total_steps, trainer.lr_warmup_iters + 1),
        lr_decay_style=trainer.lr_decay_style,
        start_wd=trainer.weight_decay,
        end_wd=trainer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )

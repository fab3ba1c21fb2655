"""Megatron's optimizer and learning-rate schedule from our configuration."""

from __future__ import annotations

import os

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from r3train.config import RunConfig
from r3train.cpu.device import threads_per_rank
from r3train.patches import patch
from r3train.trainer.megatron import fused_adam
from r3train.trainer.megatron.overrides import OPTIMIZER_DTYPES

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,  # Megatron's name for it
}


def build_optimizer(config: RunConfig, chunks: list[torch.nn.Module]) -> MegatronOptimizer:
    """AdamW or SGD over the chunks' DDP buffers.  Under bf16 the main weights are float32.

    ``optimizer_overrides`` may say otherwise.  Raises ValueError where they need a CUDA device.
    """
    trainer, bf16 = config.trainer, config.model.bf16
    on_cuda = next(chunks[0].parameters()).is_cuda
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if trainer.optimizer_overrides.get(name) and not on_cuda:
            raise ValueError(f"optimizer_overrides.{name} needs a CUDA device: this actor has none")
    if on_cuda and te.HAVE_TE:
        clip_by_kernels()
    overrides = {
        name: _DTYPES[value] if name in OPTIMIZER_DTYPES else value
        for name, value in trainer.optimizer_overrides.items()
    }
    settings = OptimizerConfig(
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
        use_distributed_optimizer=config.shards_optimizer,
        **overrides,
    )
    # torchrun leaves a rank one thread, and an Adam on the host computes on a rank's threads
    threads = threads_per_rank(os.environ) if settings.optimizer_cpu_offload else None
    if threads is not None:
        torch.set_num_threads(threads)
    groups = get_standard_config_overrides(settings)
    if bf16:
        # in groups of their own, told by a value that all have: in one group with parameters of bfloat16 Megatron
        # takes one for the other in checkpoints
        is_float32 = ParamPredicate("float32", lambda p: p.dtype is torch.float32)
        groups[ParamKey(predicate=is_float32)] = {"start_wd": trainer.weight_decay}
    # Megatron takes a float32 parameter's part as a view, which is no leaf where gradients are on: its optimizer on the
    # host refuses that
    with torch.no_grad():
        optimizer = get_megatron_optimizer(
            settings, chunks, config_overrides=groups, use_gloo_process_groups=False
        )
    for part in optimizer.chained_optimizers:
        fused_adam.mend(part)
        if not on_cuda and isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True  # one pass over the memory; Megatron cannot ask for it
    return optimizer


def clip_by_kernels() -> None:
    """Let Megatron compute the norm of all gradients, and scale them, in a kernel of Transformer Engine each.

    It imports them together with one that 2.12 lacks (``multi_tensor_scale_tensor``).  Without them it reads the device
    back for every parameter.
    """
    from transformer_engine.pytorch import optimizers as kernels

    if clip_grads.multi_tensor_scale_tensor_impl is not None:
        return
    lists = "noop_flag, tensor_lists"
    for name, kernel, expects in (
        ("multi_tensor_applier", "multi_tensor_applier", "(op, noop_flag_buffer, ...)"),
        ("l2_norm_impl", "multi_tensor_l2norm", f"(chunk_size, {lists}, per_tensor, *args)"),
        ("multi_tensor_scale_impl", "multi_tensor_scale", f"(chunk_size, {lists}, scale)"),
    ):
        why = "without a kernel that Transformer Engine 2.12 lacks, it reads the device for every gradient"
        patch(clip_grads, name, getattr(kernels, kernel), expects=expects, why=why)


def build_scheduler(config: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate over optimizer steps: linear warm-up, then the decay until the run's last step."""
    trainer = config.trainer
    total_steps = config.rollout.num_rollout * config.steps_per_rollout
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

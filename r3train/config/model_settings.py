"""The model: its checkpoint, and how Megatron builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from r3train.config.requirements import only_with, requires
from r3train.config.section import OverrideScalar, Section


# of Transformer Engine's attention, as Megatron names them
TE_KERNELS = ("flash", "fused", "unfused")


class ModelSection(Section):
    """The checkpoint, and how Megatron builds the model."""

    title: ClassVar[str] = "Model"

    hf_checkpoint: Path = Field(strict=False)
    """Hugging Face checkpoint directory; the actor and SGLang both start from it."""
    ref_load: Annotated[
        Path | None, only_with("kl_loss_coef > 0 or kl_coef > 0: no reference is loaded")
    ] = Field(default=None, strict=False)
    """Hugging Face checkpoint of the KL reference; unset means hf_checkpoint."""
    opd_teacher_load: Annotated[Path | None, only_with("opd_type = megatron")] = Field(
        default=None, strict=False
    )
    """Hugging Face checkpoint of the teacher, a model like the actor's (--opd-type megatron)."""
    bf16: bool = False
    """Train and serve in bfloat16 instead of float32."""
    attention_backend: Literal["auto", "local", "te", "flash", "fused", "unfused"] = "auto"
    """Core attention.  te: Transformer Engine, which chooses a kernel; flash, fused, unfused: its kernel of
    that name only; local: torch; auto: te on CUDA, local on a CPU."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """Dispatcher that sends tokens to the ranks of their experts; flex needs DeepEP on CUDA."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of each MoE layer's load-balancing loss.  That loss is a mean over microbatches, each
    weighted by its rows; the policy loss next to it is a mean over loss tokens.  With
    ``--transformer-override moe_router_load_balancing_type=seq_aux_loss`` it is a mean over sequences,
    each weighted by its rows, whatever packs they are in."""
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None,
        requires("recompute_method", when="full"),
        requires("recompute_num_layers", when="full"),
    ] = None
    """Recompute activations in backward: whole layers, or the modules of recompute_modules."""
    recompute_method: Annotated[
        Literal["uniform", "block"] | None, requires("recompute_granularity = full")
    ] = None
    """With full recomputation: all layers in chunks (uniform) or a stage's first layers (block)."""
    recompute_num_layers: Annotated[int | None, requires("recompute_granularity = full")] = Field(
        default=None, ge=1
    )
    """With full recomputation: layers in a chunk (uniform) or in a stage (block)."""
    recompute_modules: Annotated[tuple[str, ...], requires("recompute_granularity = selective")] = (
        Field(default=(), strict=False)
    )
    """With selective recomputation: the modules to recompute, such as core_attn or moe."""
    transformer_overrides: dict[str, OverrideScalar | list[OverrideScalar]] = {}
    """Any other field of Megatron's TransformerConfig."""

    @property
    def dtype_name(self) -> str:
        """The weights' dtype as torch and SGLang spell it."""
        return "bfloat16" if self.bf16 else "float32"

"""The model: where it comes from and how Megatron builds it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from r3train.config.section import Section

OverrideScalar = bool | int | float | str


class ModelSection(Section):
    """Where the model comes from and how Megatron builds it."""

    title: ClassVar[str] = "Model"

    hf_checkpoint: Path = Field(strict=False)
    """Hugging Face checkpoint directory: the actor's start and what SGLang serves first."""
    ref_load: Path | None = Field(default=None, strict=False)
    """Hugging Face checkpoint of the KL reference; unset means hf_checkpoint."""
    bf16: bool = False
    """Train and serve in bfloat16 instead of float32."""
    attention_backend: Literal["auto", "local", "te"] = "auto"
    """Core attention: te is Transformer Engine, local is plain torch; auto takes te on CUDA."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """How tokens travel to the ranks that hold their experts; flex needs DeepEP on CUDA."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the router's load-balancing loss."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward: whole layers, or the modules of recompute_modules."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recomputation: all layers in uniform chunks, or the first layers of a stage."""
    recompute_num_layers: int | None = Field(default=None, ge=1)
    """With full recomputation: layers of a chunk (uniform) or layers a stage (block)."""
    recompute_modules: list[str] = []
    """With selective recomputation: the modules to recompute, such as core_attn or moe."""
    transformer_overrides: dict[str, OverrideScalar | list[OverrideScalar]] = {}
    """Any other field of Megatron's TransformerConfig."""

    @property
    def dtype_name(self) -> str:
        """The weights' dtype as torch and SGLang spell it."""
        return "bfloat16" if self.bf16 else "float32"

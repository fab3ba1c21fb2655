"""The topology of the actor."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from r3train.config.requirements import requires
from r3train.config.section import Section


class ParallelSection(Section):
    """Sizes of the actor's parallelism."""

    title: ClassVar[str] = "Topology"

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split every dense matrix (TP)."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Stages that split the layers (PP)."""
    virtual_pipeline_model_parallel_size: Annotated[
        int | None, requires("pipeline_model_parallel_size > 1")
    ] = Field(default=None, ge=2)
    """Model chunks in each stage, for the interleaved schedule (VPP)."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split every sequence (CP)."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split the experts (EP)."""
    expert_tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split every expert (ETP)."""
    sequence_parallel: Annotated[bool, requires("tensor_model_parallel_size > 1")] = False
    """Split activations over the tensor ranks; required with experts under TP."""
    decoder_first_pipeline_num_layers: Annotated[
        int | None, requires("pipeline_model_parallel_size > 1")
    ] = Field(default=None, ge=1)
    """Layers of the first stage, if it differs from the others."""
    decoder_last_pipeline_num_layers: Annotated[
        int | None, requires("pipeline_model_parallel_size > 1")
    ] = Field(default=None, ge=1)
    """Layers of the last stage, if it differs from the others."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of every chunk in Megatron's layout language, such as "Et*7|(t*8|)*6t*6L"."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while backward runs."""
    overlap_param_gather: Annotated[
        bool, requires("use_distributed_optimizer"), requires("overlap_grad_reduce")
    ] = False
    """Gather updated parameters while the next forward runs."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend; auto takes nccl on CUDA and gloo elsewhere."""
    distributed_timeout_minutes: int = Field(default=10, ge=1)
    """Minutes of silence after which a rank counts as lost; a long rollout or evaluation does not count."""

    @property
    def dense_ranks(self) -> int:
        """Ranks of one model replica outside the experts: TP * PP * CP."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def fewest_ranks(self) -> int:
        """The fewest ranks that these sizes allow; other numbers are multiples of it."""
        return math.lcm(self.dense_ranks, self.expert_ranks)

    @property
    def expert_ranks(self) -> int:
        """Ranks of one replica of the experts: ETP * EP * PP."""
        return (
            self.expert_tensor_parallel_size
            * self.expert_model_parallel_size
            * self.pipeline_model_parallel_size
        )

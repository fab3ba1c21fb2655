"""Attention that normalises queries and keys over all heads at once, instead of head by head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from r3train.families.weights import ModelWeights


class WholeWidthNorm(torch.nn.Module):
    """RMSNorm over the heads of all tensor ranks; its weight is sharded as the heads are."""

    def __init__(self, width: int, config: Any, tp_group: torch.distributed.ProcessGroup):
        super().__init__()
        self.tp_size = tp_group.size()
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(
            torch.ones(width // self.tp_size, dtype=config.params_dtype)
        )
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self.width, self.eps = width, config.layernorm_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [s, b, heads, d]."""
        y = x.flatten(-2).float()
        squares = y.square().sum(-1, keepdim=True)
        if self.tp_size > 1:
            # summed in both directions: every rank's output depends on every rank's input
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares, group=self.tp_group),
                group=self.tp_group,
            )
        y = y * torch.rsqrt(squares / self.width + self.eps)
        return (y.to(x.dtype) * self.weight).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """Name the weight's axis for Megatron's checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class WholeWidthNormAttention(SelfAttention):
    """Megatron's attention with these norms.

    ``qk_layernorm`` stays off in the configuration: with it Megatron sums the gradients of
    ``q_layernorm`` and ``k_layernorm`` over the tensor ranks, which is wrong for sharded weights.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any):
        submodules = copy.copy(submodules)
        submodules.q_layernorm = submodules.k_layernorm = None
        super().__init__(config, submodules, *args, **kwargs)
        tp = self.pg_collection.tp
        self.q_layernorm = WholeWidthNorm(
            config.num_attention_heads * config.kv_channels, config, tp
        )
        self.k_layernorm = WholeWidthNorm(config.num_query_groups * config.kv_channels, config, tp)


def adapt_whole_width_norm(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Give every layer this attention."""
    for layer in layers.layer_specs:
        layer.submodules.self_attention.module = WholeWidthNormAttention

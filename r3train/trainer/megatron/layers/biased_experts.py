"""Experts with biases in Megatron's local layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear

from r3train.families.weights import ModelWeights


class _OwnOutput(RowParallelLinear):
    """An expert's projection whose output is no view: Megatron adds its bias in place.

    Its bias is not one of a sequence-parallel layer: the gradient would be summed over the tensor
    ranks once more.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(x)
        return output.clone(), bias


def adapt_biased_experts(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Give the experts of Megatron's local layers such an output."""
    if use_te:
        return
    for layer in layers.layer_specs:
        experts = layer.submodules.mlp.keywords["submodules"].experts
        experts.keywords["submodules"].linear_fc2 = _OwnOutput

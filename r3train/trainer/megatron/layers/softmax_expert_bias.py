"""Experts chosen by a softmax over all experts plus a bias, as in ERNIE-4.5.

Megatron adds biases to sigmoids only, and then normalises the sigmoids of the chosen experts, which is what ERNIE-4.5 does
with its softmax.  The sigmoid of ln(p / (1 - p)) is p: with these for logits Megatron computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from r3train.families.weights import ModelWeights
from r3train.patches import overrides

_BELOW_ONE = 1 - 2**-24  # the float32 before 1


class SoftmaxRouter(TopKRouter):
    """A router of sigmoids that are a softmax over all experts."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return ln(p / (1 - p)) of each expert's probability p, float32[..., E]."""
        logits = super().gating(input).float()
        probabilities = logits.softmax(-1).clamp(max=_BELOW_ONE)
        return logits.log_softmax(-1) - (-probabilities).log1p()


overrides(
    TopKRouter,
    "gating",
    expects="(self, input)",
    why="sigmoids of its logits are a softmax",
)


def adapt_softmax_expert_bias(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Give the layers with experts such a router."""
    for i, layer in enumerate(layers.layer_specs):
        if "sparse" in weights.traits[first_layer + i]:
            layer.submodules.mlp.keywords["submodules"].router = SoftmaxRouter

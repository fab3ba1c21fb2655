"""Changes of Megatron's layers that families need, by the word in ``Family.layers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r3train.families.weights import ModelWeights
from r3train.trainer.megatron.layers.biased_experts import adapt_biased_experts
from r3train.trainer.megatron.layers.gated_delta_net import adapt_gated_delta_net
from r3train.trainer.megatron.layers.latent_attention import adapt_latent_attention
from r3train.trainer.megatron.layers.mamba import adapt_mamba
from r3train.trainer.megatron.layers.softmax_expert_bias import adapt_softmax_expert_bias
from r3train.trainer.megatron.layers.sparse_attention import adapt_sparse_attention
from r3train.trainer.megatron.layers.whole_width_norm import adapt_whole_width_norm


def as_megatron_has_them(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Leave the layers' specifications only."""


# each changes the specifications of one chunk's layers (TransformerBlockSubmodules) in place; first_layer is
# the layer_id of the first, and use_te is True for Transformer Engine's
ADAPTATIONS: dict[str, Callable[[Any, ModelWeights, int, bool], None]] = {
    "": as_megatron_has_them,
    "biased_experts": adapt_biased_experts,
    "gated_delta_net": adapt_gated_delta_net,
    "latent_attention": adapt_latent_attention,
    "mamba": adapt_mamba,
    "softmax_expert_bias": adapt_softmax_expert_bias,
    "sparse_latent_attention": adapt_sparse_attention,
    "whole_width_norm": adapt_whole_width_norm,
}

"""Multi-head latent attention (MLA) of Megatron's local layers."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import multi_latent_attention as mla

from r3train.families.weights import ModelWeights
from r3train.patches import patch


def adapt_latent_attention(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Give the local layers whole down projections, as Transformer Engine's have.

    Megatron's local layers shard them, and the gradient of the rotary key, which all heads share, is
    then never summed over the tensor ranks: log-probs are right, gradients below it are off by 20%.
    """
    if use_te:
        return
    if not isinstance(mla.TELinear, type):  # a stand-in without Transformer Engine, of no class
        why = "it says that Transformer Engine is there where a stand-in of no class is"
        patch(mla, "HAVE_TE", False, expects="bool", why=why)
    for layer in layers.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = mla.Linear

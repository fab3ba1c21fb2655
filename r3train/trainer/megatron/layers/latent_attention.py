"""Multi-head latent attention (MLA) of Megatron's local layers."""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention as mla

from r3train.families.weights import ModelWeights
from r3train.patches import overrides, patch


class AttentionWithoutQueryNorm(mla.MLASelfAttention):
    """Latent attention of queries that are not compressed: they have no norm.

    With ``qk_layernorm``, which the keys need, Megatron would put one before their projection.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


overrides(
    mla.MLASelfAttention,
    "_resolve_qk_norm_config",
    expects="(self, submodules)",
    why="it puts a norm before queries that are not compressed",
)


def adapt_latent_attention(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Leave out the norm of queries that are not compressed, and give the local layers whole down projections.

    Transformer Engine's layers have whole ones.  Megatron's local layers shard them, and the gradient of the
    rotary key, which all heads share, is then never summed over the tensor ranks: log-probs are right,
    gradients below it are off by 20%.
    """
    if mla.Linear is None:
        why = "it takes whole down projections only where Transformer Engine is"
        patch(mla, "Linear", Linear, expects="NoneType", why=why)
    for i, layer in enumerate(layers.layer_specs):
        attention = layer.submodules.self_attention
        if "no_q_rank" in weights.traits[first_layer + i]:
            attention.module = AttentionWithoutQueryNorm
        if not use_te:
            parts = attention.submodules
            parts.linear_q_down_proj = parts.linear_kv_down_proj = Linear

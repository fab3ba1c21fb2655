"""DeepSeek-V3 and R1, Kimi-K2, Moonlight, GLM-4.7-Flash: multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import Any

from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.enums import AttnBackend

from r3train.trainer.megatron.families.family import MegatronFamily


class LatentAttentionBridge(DeepseekV3Bridge):
    """mbridge 0.15.1's configuration for megatron-core 0.16.1."""

    def __init__(self, hf_config: Any, **kwargs: Any):
        if not hasattr(hf_config, "first_k_dense_replace"):  # glm4_moe_lite lists its layers
            hf_config.first_k_dense_replace = hf_config.mlp_layer_types.count("dense")
        super().__init__(hf_config, **kwargs)

    def _build_base_config(self, **kwargs: Any) -> Any:
        # of another version: this one's MLATransformerConfig has no such field
        kwargs.pop("max_position_embeddings", None)
        return super()._build_base_config(**kwargs)


def _fields(hf_config: Any) -> dict[str, Any]:
    """Add positions and groups, which mbridge looks for elsewhere, and what must not move in RL."""
    rope = hf_config.rope_parameters
    yarn = rope.get("rope_type") == "yarn"
    fields = {
        "rope_type": "yarn" if yarn else "rope",
        "rotary_scaling_factor": rope["factor"] if yarn else 1.0,
        "mscale": rope.get("mscale", 1.0) if yarn else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0) if yarn else 1.0,
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
        "mtp_num_layers": None,  # draft layers are not trained
        "moe_router_bias_update_rate": 0.0,  # mbridge's rate moves the experts' biases at every step
        "attention_backend": AttnBackend.auto,  # mbridge's sets NVTE_* for the whole process
    }
    if (hf_config.n_group or 1) > 1:
        fields["moe_router_num_groups"] = hf_config.n_group
        fields["moe_router_group_topk"] = hf_config.topk_group
    return fields


def _adapt(layers: Any, hf_config: Any, first_layer: int, use_te: bool) -> None:
    """Give the local layers whole down projections, as Transformer Engine's have.

    Megatron's local layers shard them, and the gradient of the rotary key, which all heads share, is
    then never summed over the tensor ranks: log-probs are right, gradients below it are off by 20%.
    """
    if use_te:
        return
    if not isinstance(mla.TELinear, type):  # a stand-in without Transformer Engine, of no class
        mla.HAVE_TE = False
    for layer in layers.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = mla.Linear


DEEPSEEK_V3 = MegatronFamily(LatentAttentionBridge, _fields, _adapt)

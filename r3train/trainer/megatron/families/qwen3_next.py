"""Qwen3-Next: three layers of a gated delta net to one of gated attention, and a gated shared expert."""

from __future__ import annotations

import copy
from typing import Any

from mbridge.models.qwen2moe import Qwen2MoEBridge
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from r3train.trainer.megatron.families.family import MegatronFamily
from r3train.trainer.megatron.families.gated_delta_net import PackedGatedDeltaNet, ZeroCenteredNorm


class Qwen3NextBridge(Qwen2MoEBridge):
    """Qwen2-MoE's configuration, with a part of a head rotated."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        part = self.hf_config.rope_parameters["partial_rotary_factor"]
        return super()._get_gptmodel_args() | {"rotary_percent": part}


def fields(hf_config: Any) -> dict[str, Any]:
    """Return TransformerConfig fields of hybrid models."""
    return {
        # Qwen3.5's configuration has no such key: its gates are always normalised
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_gate": True,
        "moe_shared_expert_overlap": False,  # nobody verified a gate with it
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "apply_rope_fusion": False,
        "linear_conv_kernel_dim": hf_config.linear_conv_kernel_dim,
        "linear_key_head_dim": hf_config.linear_key_head_dim,
        "linear_value_head_dim": hf_config.linear_value_head_dim,
        "linear_num_key_heads": hf_config.linear_num_key_heads,
        "linear_num_value_heads": hf_config.linear_num_value_heads,
    }


def adapt(layers: Any, hf_config: Any, first_layer: int, use_te: bool) -> None:
    """Put in the delta nets and the norms; refuse layers that nobody verified."""
    if use_te:
        raise ValueError(
            f"{hf_config.model_type} was verified with --attention-backend local alone, on a CPU"
        )
    backend = LocalSpecProvider()
    delta_net = ModuleSpec(
        module=PackedGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(),
            out_norm=backend.layer_norm(rms_norm=True),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    for i, spec in enumerate(layers.layer_specs):
        # layers share one specification
        layer = layers.layer_specs[i] = copy.deepcopy(spec)
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCenteredNorm
        if hf_config.layer_types[first_layer + i] == "linear_attention":
            parts.self_attention = delta_net
        else:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm
    layers.layer_norm = ZeroCenteredNorm


QWEN3_NEXT = MegatronFamily(Qwen3NextBridge, fields, adapt)

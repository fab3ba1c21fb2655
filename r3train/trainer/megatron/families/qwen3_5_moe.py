"""Qwen3.5-MoE's language model: Qwen3-Next's layers, four input projections, fused experts on disk."""

from __future__ import annotations

import torch

from r3train.trainer.megatron.families.family import MegatronFamily
from r3train.trainer.megatron.families.fused_experts import FusedExperts
from r3train.trainer.megatron.families.qwen3_next import Qwen3NextBridge, adapt, fields

_LAYER = "model.layers.{layer_number}."


class Qwen35MoeBridge(FusedExperts, Qwen3NextBridge):
    """Names and layouts; ``hf_config`` is the text_config of the checkpoint's configuration."""

    _CONFIG_MAPPING = Qwen3NextBridge._CONFIG_MAPPING | {
        "ffn_hidden_size": "moe_intermediate_size"  # it has no dense layers
    }
    _ATTENTION_MAPPING = Qwen3NextBridge._ATTENTION_MAPPING | {
        "self_attention.in_proj.weight": [
            _LAYER + f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")
        ]
    }
    _MLP_MAPPING = Qwen3NextBridge._MLP_MAPPING | {
        "mlp.experts.linear_fc1": [_LAYER + "mlp.experts.gate_up_proj"],
        "mlp.experts.linear_fc2": [_LAYER + "mlp.experts.down_proj"],
    }

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        names = super()._weight_name_mapping_mcore_to_hf(name)
        return [n.replace("model.", "model.language_model.", 1) for n in names]

    def _in_from_disk(self, hf_weights: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(hf_weights)

    def _in_to_disk(self, *sections: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat(sections[:3]), *sections[3:]]


QWEN3_5_MOE = MegatronFamily(Qwen35MoeBridge, fields, adapt)

"""Qwen3.5-MoE's language model: Qwen3-Next's layers."""

from __future__ import annotations

from r3train.trainer.megatron.families.family import MegatronFamily
from r3train.trainer.megatron.families.qwen3_next import Qwen3NextBridge, adapt, fields


class Qwen35MoeBridge(Qwen3NextBridge):
    """Its widths; ``hf_config`` is the text_config of the checkpoint's configuration."""

    _CONFIG_MAPPING = Qwen3NextBridge._CONFIG_MAPPING | {
        "ffn_hidden_size": "moe_intermediate_size"  # it has no dense layers
    }


QWEN3_5_MOE = MegatronFamily(Qwen35MoeBridge, fields, adapt)

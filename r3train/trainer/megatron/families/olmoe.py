"""OLMoE."""

from __future__ import annotations

from typing import Any

from mbridge.models.mixtral import MixtralBridge

from r3train.trainer.megatron.families.family import FUSED, MegatronFamily
from r3train.trainer.megatron.families.whole_width_norm import adapt_whole_width_norm


def _fields(hf_config: Any) -> dict[str, Any]:
    return FUSED | {
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_bias_update_rate": 0.0,
    }


OLMOE = MegatronFamily(MixtralBridge, _fields, adapt_whole_width_norm)

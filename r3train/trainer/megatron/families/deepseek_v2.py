"""DeepSeek-V2-Lite and DeepSeek-Coder-V2-Lite: DeepSeek-V3's attention, experts by a softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.trainer.megatron.families.deepseek import DEEPSEEK_V3


def _fields(hf_config: Any) -> dict[str, Any]:
    return DEEPSEEK_V3.fields(hf_config) | {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,  # gates are over all experts, and not normalised again
        "moe_router_enable_expert_bias": False,
    }


DEEPSEEK_V2 = replace(DEEPSEEK_V3, fields=_fields)

"""Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3moe import Qwen3MoEBridge

from r3train.trainer.megatron.families.family import MegatronFamily


def _qwen3_moe(hf_config: Any) -> dict[str, Any]:
    """Read ``norm_topk_prob``: without it gates are shares of all experts, not of the chosen ones.

    mbridge takes it for true in Qwen3-MoE, and for false in Qwen2-MoE.
    """
    return {"moe_router_pre_softmax": not hf_config.norm_topk_prob}


def _qwen2_moe(hf_config: Any) -> dict[str, Any]:
    """Add the shared expert's gate too: mbridge has its name, and builds none."""
    return _qwen3_moe(hf_config) | {
        "moe_shared_expert_gate": True,
        "moe_shared_expert_overlap": False,  # nobody verified a gate with it
    }


QWEN2_MOE = MegatronFamily(Qwen2MoEBridge, _qwen2_moe)
QWEN3_MOE = MegatronFamily(Qwen3MoEBridge, _qwen3_moe)

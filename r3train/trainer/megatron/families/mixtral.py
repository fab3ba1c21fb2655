"""Mixtral."""

from __future__ import annotations

from typing import Any

from mbridge.models.mixtral import MixtralBridge

from r3train.trainer.megatron.families.family import FUSED, MegatronFamily


def _fields(hf_config: Any) -> dict[str, Any]:
    """Softmax over the chosen experts alone; mbridge takes it over all experts."""
    return FUSED | {"moe_router_pre_softmax": False, "moe_router_bias_update_rate": 0.0}


MIXTRAL = MegatronFamily(MixtralBridge, _fields)

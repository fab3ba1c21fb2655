"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from mbridge.models.mixtral import MixtralBridge

from r3train.trainer.megatron.families.family import FUSED, MegatronFamily
from r3train.trainer.megatron.families.whole_width_norm import adapt_whole_width_norm


class MiniMaxM2Bridge(MixtralBridge):
    """Mixtral's configuration, with a part of a head rotated."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        part = self.hf_config.rope_parameters.get("partial_rotary_factor", 1.0)
        return super()._get_gptmodel_args() | {"rotary_percent": part}


def _fields(hf_config: Any) -> dict[str, Any]:
    return FUSED | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    }


MINIMAX_M2 = MegatronFamily(MiniMaxM2Bridge, _fields, adapt_whole_width_norm)

"""DeepSeek-V2-Lite and DeepSeek-Coder-V2-Lite: DeepSeek-V3's attention, experts by a softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.deepseek_v3 import (
    DEEPSEEK_V3,
    LATENT_ATTENTION,
    TINY_YARN,
    deepseek_v3,
    tiny_moonlight,
)
from r3train.families.family import SILU
from r3train.families.weight_rows import DENSE_MLP, SHARED_EXPERTS, experts, router
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import Fields, Keys
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    """Return DeepSeek-V3's fields with gates over all experts, not normalised again."""
    gates = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    return deepseek_v3(keys) | gates


def _tiny(o: TinyOptions) -> dict[str, Any]:
    """Return the keys of Moonlight with yarn, and the gates of a softmax."""
    gates = dict(norm_topk_prob=False, routed_scaling_factor=1.0, topk_method="greedy")
    return tiny_moonlight(o, rope_parameters=TINY_YARN, **gates)


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    weights=Table((*LATENT_ATTENTION, *DENSE_MLP, router(), *experts(), *SHARED_EXPERTS)),
    needs=SILU
    | {
        "norm_topk_prob": (False, False),
        "attention_bias": (False, False),
        "scoring_func": ("softmax", "softmax"),
        "topk_method": ("greedy", "greedy"),
        "n_group": (1, 1),
        "routed_scaling_factor": (1.0, 1.0),
    },
    transformer=_transformer,
    defaults={"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    adapters_served=False,
    tiny={
        "deepseek_v2": TinyModel(
            "DeepseekV2", _tiny, {"scoring_func": "softmax", "moe_layer_freq": 1}
        )
    },
)

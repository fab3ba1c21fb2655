"""OLMoE: norms over all heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import SILU, Config, Family
from r3train.families.weight_rows import HEADS, INPUT_NORM, MLP_NORM, WIDE_NORMS, experts, router
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import FUSED, Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _conflicts(config: Config) -> Iterator[str]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups not in (None, heads):
        yield (
            f"num_key_value_heads is {groups}, expected {heads} (num_attention_heads): SGLang"
            " normalises the keys of olmoe as wide as its queries"
        )


def _transformer(keys: Keys) -> Fields:
    gates = {"moe_router_pre_softmax": not keys["norm_topk_prob"]}
    return FUSED | experts_of(keys, "intermediate_size", **gates)


def _tiny(o: TinyOptions) -> dict[str, Any]:
    return {
        "num_key_value_heads": o.num_heads,
        "intermediate_size": o.moe_intermediate_size,
        "num_experts": o.num_experts,
        "num_experts_per_tok": o.topk,
        "norm_topk_prob": False,
    }


OLMOE = Family(
    Table(
        (INPUT_NORM, *HEADS, *WIDE_NORMS, MLP_NORM, router(), *experts()),
        expert_width="intermediate_size",
    ),
    _transformer,
    SILU
    | {
        "attention_bias": (False, False),
        "clip_qkv": (None, None),
        # fixed in SGLang
        "norm_topk_prob": (False, False),
        "rms_norm_eps": (1e-5, 1e-5),
    },
    conflicts=_conflicts,
    defaults={"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    layers="whole_width_norm",
    lora=True,
    adapters_served=True,
    fp8_served=True,
    tiny={"olmoe": TinyModel("Olmoe", _tiny)},
)

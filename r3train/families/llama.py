"""Llama 3, 3.1, 3.2 and 3.3, dense: positions scaled in Llama 3.1's way, or plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import SILU, Config, Family
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys, whole_heads_rotate
from r3train.families.weight_rows import DENSE_MLP, HEADS, INPUT_NORM, MLP_NORM
from r3train.families.weights import Table

# of scaled positions, fixed in megatron-core 0.19.2 RotaryEmbedding._apply_scaling
_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _conflicts(config: Config) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return
    for key, value in _FIXED.items():
        if rope.get(key) != value:
            yield f"{key} of scaled positions is {rope.get(key)}, expected {value}, fixed in Megatron"


def _rotary(keys: Keys) -> Fields:
    rope = keys.rope
    if rope["rope_type"] != "llama3":
        return whole_heads_rotate(keys)
    return whole_heads_rotate(keys) | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}


def _tiny(o: TinyOptions) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0} | _FIXED
    return {"rope_parameters": rope}


LLAMA = Family(
    Table((INPUT_NORM, *HEADS, MLP_NORM, *DENSE_MLP)),
    lambda keys: FUSED_AND_PERSISTENT,
    SILU | {"attention_bias": (False, False), "mlp_bias": (False, False)},
    rope_types=("llama3",),
    conflicts=_conflicts,
    rotary=_rotary,
    lora=True,
    tiny={"llama": TinyModel("Llama", _tiny)},
)

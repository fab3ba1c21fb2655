"""Qwen3, dense."""

from __future__ import annotations

from typing import Any

from r3train.families.family import SILU, Family
from r3train.families.weight_rows import DENSE_MLP, HEADS, INPUT_NORM, MLP_NORM, qk_norms
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    return FUSED_AND_PERSISTENT | {"qk_layernorm": True}


def _tiny(o: TinyOptions) -> dict[str, Any]:
    return {"head_dim": o.head_dim}


QWEN3 = Family(
    Table((INPUT_NORM, *HEADS, *qk_norms(), MLP_NORM, *DENSE_MLP)),
    _transformer,
    SILU | {"attention_bias": (False, False), "use_sliding_window": (False, False)},
    defaults={"head_dim": 128},
    lora=True,
    tiny={"qwen3": TinyModel("Qwen3", _tiny)},
)

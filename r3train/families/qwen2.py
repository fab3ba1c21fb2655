"""Qwen2 and Qwen2.5, dense: biases of query, key and value."""

from __future__ import annotations

from r3train.families.family import SILU, Family
from r3train.families.tiny_options import TinyModel, no_keys
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys
from r3train.families.weight_rows import DENSE_MLP, HEADS, INPUT_NORM, MLP_NORM, qkv
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    return FUSED_AND_PERSISTENT | {"add_qkv_bias": True}


QWEN2 = Family(
    Table((INPUT_NORM, *HEADS, qkv("bias"), MLP_NORM, *DENSE_MLP)),
    _transformer,
    SILU | {"use_sliding_window": (False, False)},
    lora=True,
    tiny={"qwen2": TinyModel("Qwen2", no_keys)},
)

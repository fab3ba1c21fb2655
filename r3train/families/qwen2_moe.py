"""Qwen2-MoE: biases of query, key and value, and a shared expert with a gate."""

from __future__ import annotations

from r3train.families.family import SILU, Family
from r3train.families.rows import (
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    experts,
    qkv,
    router,
)
from r3train.families.weights import Table

QWEN2_MOE = Family(
    Table(
        (
            *(INPUT_NORM, *HEADS, qkv("bias"), MLP_NORM, *DENSE_MLP),
            *(router(), *experts(), *GATED_SHARED_EXPERT),
        ),
        heads_share_hidden=True,
    ),
    SILU | {"use_sliding_window": (False, False), "qkv_bias": (True, True)},
    lora=True,
)

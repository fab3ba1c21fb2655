"""Mixtral."""

from __future__ import annotations

from r3train.families.family import SILU, Family
from r3train.families.rows import HEADS, INPUT_NORM, MLP_NORM, W123, router
from r3train.families.weights import Table

MIXTRAL = Family(
    Table(
        (INPUT_NORM, *HEADS, MLP_NORM, router("block_sparse_moe.gate.weight"), *W123),
        expert_width="intermediate_size",
        heads_share_hidden=True,
    ),
    SILU | {"sliding_window": (None, None), "router_jitter_noise": (0.0, 0.0)},
    lora=True,
    adapters_served=True,
)

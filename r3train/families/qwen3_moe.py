"""Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from r3train.families.qwen3 import QWEN3
from r3train.families.rows import experts, router
from r3train.families.weights import Table

QWEN3_MOE = replace(
    QWEN3,
    weights=Table((*QWEN3.weights.of_layer, router(), *experts())),
    adapters_served=True,
)

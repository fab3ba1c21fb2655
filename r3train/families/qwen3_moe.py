"""Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from r3train.families.qwen3 import QWEN3
from r3train.families.rows import experts, router
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    # gates are shares of the chosen experts, or of all experts
    gates = {"moe_router_pre_softmax": not keys["norm_topk_prob"]}
    return FUSED_AND_PERSISTENT | {"qk_layernorm": True} | experts_of(keys, **gates)


QWEN3_MOE = replace(
    QWEN3,
    weights=Table((*QWEN3.weights.of_layer, router(), *experts())),
    transformer=_transformer,
    defaults={"norm_topk_prob": False},
    adapters_served=True,
    served_sparse=True,
)

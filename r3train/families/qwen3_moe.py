"""Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.qwen3 import QWEN3
from r3train.families.weight_rows import experts, router
from r3train.families.tiny_options import TinyModel, TinyOptions, with_experts
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    # gates are shares of the chosen experts, or of all experts
    gates = {"moe_router_pre_softmax": not keys["norm_topk_prob"]}
    return FUSED_AND_PERSISTENT | {"qk_layernorm": True} | experts_of(keys, **gates)


def tiny_qwen3_moe(o: TinyOptions) -> dict[str, Any]:
    """Return the keys of Qwen3-MoE; a hybrid model adds to them."""
    more = dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return with_experts(o, head_dim=o.head_dim, **more)


QWEN3_MOE = replace(
    QWEN3,
    weights=Table((*QWEN3.weights.layer_weights, router(), *experts())),
    transformer=_transformer,
    defaults={"norm_topk_prob": False},
    adapters_served=True,
    fp8_served=True,
    served_sparse=True,
    tiny={"qwen3_moe": TinyModel("Qwen3Moe", tiny_qwen3_moe)},
)

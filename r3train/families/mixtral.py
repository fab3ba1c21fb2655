"""Mixtral."""

from __future__ import annotations

from typing import Any

from r3train.families.family import SILU, Family
from r3train.families.weight_rows import HEADS, INPUT_NORM, MLP_NORM, W123, router
from r3train.families.tiny_options import TinyModel, TinyOptions, with_local_experts
from r3train.families.transformer import FUSED, Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    return FUSED | experts_of(keys, "intermediate_size")


def _tiny(o: TinyOptions) -> dict[str, Any]:
    return with_local_experts(o, head_dim=None)  # published so


MIXTRAL = Family(
    Table(
        (INPUT_NORM, *HEADS, MLP_NORM, router("block_sparse_moe.gate.weight"), *W123),
        expert_width="intermediate_size",
    ),
    _transformer,
    SILU | {"sliding_window": (None, None), "router_jitter_noise": (0.0, 0.0)},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    lora=True,
    adapters_served=True,
    fp8_served=True,
    tiny={"mixtral": TinyModel("Mixtral", _tiny)},
)

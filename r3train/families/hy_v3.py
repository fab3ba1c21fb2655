"""Hy3: norms of queries and keys, sigmoid gates with expert biases, a shared expert, the first layer dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import SILU, Config, Family
from r3train.families.weight_rows import (
    DENSE_MLP,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    expert_bias,
    experts,
    qk_norms,
    router,
    shared_experts,
)
from r3train.families.tiny_options import TinyModel, TinyOptions, with_experts
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _conflicts(config: Config) -> Iterator[str]:
    """SGLang reads first_k_dense_replace, transformers mlp_layer_types."""
    kinds = config.get("mlp_layer_types")
    if kinds is not None and kinds != ["dense"] + ["sparse"] * (len(kinds) - 1):
        yield f"mlp_layer_types is {kinds}, and SGLang takes the first layer only as dense"


def _transformer(keys: Keys) -> Fields:
    gates = {
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": keys["router_scaling_factor"],
    }
    shared = {
        "moe_shared_expert_intermediate_size": keys.integer("moe_intermediate_size"),
        "moe_shared_expert_overlap": True,
    }
    return FUSED_AND_PERSISTENT | {"qk_layernorm": True} | experts_of(keys, **gates) | shared


def _tiny(o: TinyOptions) -> dict[str, Any]:
    more = {"num_shared_experts": 1, "router_scaling_factor": 1.5}
    return with_experts(o, head_dim=o.head_dim, **more)


HY_V3 = Family(
    Table(
        (
            INPUT_NORM,
            *HEADS,
            *qk_norms(),
            MLP_NORM,
            *DENSE_MLP,
            router("mlp.router.gate.weight"),
            expert_bias("mlp.expert_bias"),
            *experts(),
            *shared_experts("mlp.shared_mlp", "expert"),
        )
    ),
    _transformer,
    SILU
    | {
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "num_shared_experts": (1, 1),
        "use_qk_norm": (True, True),
        # what SGLang takes for a key that is missing is another model
        "qk_norm": (True, None),
        "route_norm": (True, None),
        "first_k_dense_replace": (1, None),
    },
    conflicts=_conflicts,
    lora=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "head_dim": 128,
        "router_scaling_factor": 2.826,
    },
    fp8_served=True,
    tiny={
        "hy_v3": TinyModel(
            "HYV3", _tiny, {"first_k_dense_replace": 1, "qk_norm": True, "route_norm": True}
        )
    },
)

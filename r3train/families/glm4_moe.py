"""GLM-4.5: biases of query, key and value, sigmoid gates with expert biases, the first layers dense."""

from __future__ import annotations

from typing import Any

from r3train.families.family import SILU, Family
from r3train.families.weight_rows import (
    DENSE_MLP,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    SHARED_EXPERTS,
    expert_bias,
    experts,
    qk_norms,
    qkv,
    router,
)
from r3train.families.tiny_options import TinyModel, TinyOptions, with_experts
from r3train.families.transformer import (
    FUSED_AND_PERSISTENT,
    Fields,
    Keys,
    part_of_heads_rotates,
    sigmoid_and_shared,
)
from r3train.families.weights import Table


def _transformer(keys: Keys) -> Fields:
    return (
        FUSED_AND_PERSISTENT
        | sigmoid_and_shared(keys, 1)
        | {"qk_layernorm": keys["use_qk_norm"], "add_qkv_bias": True}
    )


def _tiny(o: TinyOptions) -> dict[str, Any]:
    return with_experts(
        o,
        "n_routed_experts",
        head_dim=o.head_dim,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
    )


GLM4_MOE = Family(
    Table(
        (
            INPUT_NORM,
            *HEADS,
            qkv("bias"),
            *qk_norms(layers=("qk_norm",)),
            MLP_NORM,
            *DENSE_MLP,
            router(),
            expert_bias("mlp.gate.e_score_correction_bias"),
            *experts(),
            *SHARED_EXPERTS,
        )
    ),
    _transformer,
    SILU
    | {
        "norm_topk_prob": (True, True),
        "n_group": (1, 1),
        "topk_group": (1, 1),
        "n_shared_experts": (1, 1),
        "attention_bias": (True, False),
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
    },
    rotary=part_of_heads_rotates,
    lora=True,
    adapters_served=True,
    peft_fuses_experts=True,
    fp8_served=True,
    tiny={"glm4_moe": TinyModel("Glm4Moe", _tiny)},
)

"""Qwen2-MoE: biases of query, key and value, and a shared expert with a gate."""

from __future__ import annotations

from typing import Any

from r3train.families.family import SILU, Family
from r3train.families.weight_rows import (
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    experts,
    qkv,
    router,
)
from r3train.families.tiny_options import TinyModel, TinyOptions, with_experts
from r3train.families.transformer import (
    FUSED_AND_PERSISTENT,
    Fields,
    Keys,
    experts as experts_of,
    gated_shared_expert,
)
from r3train.families.weights import Table
from r3train.patches import patch


def qwen2_moe(keys: Keys) -> Fields:
    """Return the fields of Qwen2-MoE; a hybrid model adds to them."""
    return (
        FUSED_AND_PERSISTENT
        | {"add_qkv_bias": True}
        | gated_shared_expert(keys)
        | experts_of(keys, moe_router_pre_softmax=not keys["norm_topk_prob"])
    )


def _tiny(o: TinyOptions) -> dict[str, Any]:
    shared = o.moe_intermediate_size * 3 // 2
    return with_experts(o, shared_expert_intermediate_size=shared, norm_topk_prob=False)


QWEN2_MOE = Family(
    Table(
        (
            INPUT_NORM,
            *HEADS,
            qkv("bias"),
            MLP_NORM,
            *DENSE_MLP,
            router(),
            *experts(),
            *GATED_SHARED_EXPERT,
        ),
    ),
    qwen2_moe,
    SILU | {"use_sliding_window": (False, False), "qkv_bias": (True, True)},
    defaults={"norm_topk_prob": False},
    lora=True,
    served_sparse=True,
    fp8_served=True,
    tiny={"qwen2_moe": TinyModel("Qwen2Moe", _tiny)},
)


def serve_on_cpu() -> None:
    """Put the shared expert's output [T, hidden] under its gate, also of Qwen3-Next and Qwen3.5."""
    import torch
    from sglang.srt.models import qwen2_moe

    def gated(hidden_states, gate_weight, shared_output):
        return torch.sigmoid(hidden_states @ gate_weight.reshape(-1, 1)) * shared_output

    def add_gated(hidden_states, gate_weight, shared_output, final_hidden_states):
        final_hidden_states += gated(hidden_states, gate_weight, shared_output)

    given = "hidden_states, gate_weight, shared_output"
    for name, replacement, expects in (
        ("fused_gate_sigmoid_mul", gated, f"({given})"),
        ("fused_gate_sigmoid_mul_add", add_gated, f"({given}, final_hidden_states)"),
    ):
        patch(qwen2_moe, name, replacement, expects=expects, why="it is a triton kernel")

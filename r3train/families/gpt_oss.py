"""gpt-oss: sinks, sliding windows, biases everywhere, all experts of a layer in one tensor on disk."""

from __future__ import annotations

from collections.abc import Iterator

from r3train.families.family import Config, Family
from r3train.families.rows import (
    ATTENTION,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    fused_experts,
    qkv,
    router,
    vector,
)
from r3train.families.weights import Table


def _conflicts(config: Config) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        yield f"rope_type is {rope.get('rope_type')!r}, expected 'yarn' as in the published models"
    if not isinstance(config.get("sliding_window"), int):
        yield f"sliding_window is {config.get('sliding_window')!r}, expected a number of tokens"


_LAYOUT = dict(alternate=True, transposed=True, lora=True)

GPT_OSS = Family(
    Table(
        (
            *(INPUT_NORM, *HEADS, qkv("bias")),
            vector(f"{ATTENTION}linear_proj.bias", "self_attn.o_proj.bias", "hidden"),
            vector(
                f"{ATTENTION}core_attention.softmax_offset",
                "self_attn.sinks",
                "heads",
                sharded="rows",
            ),
            *(MLP_NORM, router("mlp.router.weight")),
            vector("mlp.router.bias", "mlp.router.bias", "experts", layers=("sparse",)),
            *fused_experts(**_LAYOUT),
            *fused_experts("bias", **_LAYOUT),
        ),
        expert_width="intermediate_size",
    ),
    {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (True, True),
        "swiglu_alpha": (1.702, 1.702),
    },
    rope_types=("yarn",),
    alone={"expert_tensor_parallel_size": "its experts have biases"},
    log_prob_gap=1e-3,  # SGLang keeps its sinks in bfloat16
    lora=True,
    conflicts=_conflicts,
    unfused_rope=(
        "for packed sequences Megatron's fused kernel leaves out the factor of yarn by which this"
        " model's queries and keys grow, and every log-prob would be another"
    ),
)

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
from r3train.families.transformer import Fields, Keys, experts as experts_of
from r3train.families.weights import Table


def _conflicts(config: Config) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        yield f"rope_type is {rope.get('rope_type')!r}, expected 'yarn' as in the published models"
    if not isinstance(config.get("sliding_window"), int):
        yield f"sliding_window is {config.get('sliding_window')!r}, expected a number of tokens"


def _transformer(keys: Keys) -> Fields:
    every_other = ["sliding_attention", "full_attention"] * keys["num_hidden_layers"]
    kinds = list(keys.get("layer_types", every_other))[: keys["num_hidden_layers"]]
    return experts_of(keys, "intermediate_size") | {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": keys["swiglu_limit"],
        "bias_activation_fusion": False,
        "softmax_type": "learnable",
        # a window of n tokens holds the token and n - 1 before it
        "window_size": (keys.integer("sliding_window") - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def _rotary(keys: Keys) -> Fields:
    return {"position_embedding_type": "yarn", "rotary_base": keys.rope["rope_theta"]}


def _yarn(keys: Keys) -> Fields:
    """Return what GPTModel asks for by name."""
    rope = keys.rope
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_beta_fast": rope["beta_fast"],
        "yarn_beta_slow": rope["beta_slow"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
    }


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
    _transformer,
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
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64, "swiglu_limit": 7.0},
    rotary=_rotary,
    attributes=_yarn,
    layers="biased_experts",
    activation_steps=8,  # its activation is made of several steps
    unfused_rope=(
        "for packed sequences Megatron's fused kernel leaves out the factor of yarn by which this"
        " model's queries and keys grow, and every log-prob would be another"
    ),
)

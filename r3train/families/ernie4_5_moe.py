"""ERNIE-4.5-21B-A3B: heads that rotate pairs of neighbours, experts by a softmax and biases, the first layers dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from r3train.families.family import SILU, Config, Family
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys, sigmoid_and_shared
from r3train.families.weight_rows import (
    DENSE_MLP,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    SHARED_EXPERTS,
    expert_bias,
    experts,
    router,
)
from r3train.families.weights import Table
from r3train.patches import patch


def _conflicts(config: Config) -> Iterator[str]:
    last = config.get("num_hidden_layers", 0) - 1
    if config.get("moe_layer_end_index", -1) not in (-1, last):
        yield f"moe_layer_end_index is {config['moe_layer_end_index']}, expected {last}, the last layer"
    if config.get("moe_layer_start_index") is None:
        yield "moe_layer_start_index is missing"


def _transformer(keys: Keys) -> Fields:
    shared = sigmoid_and_shared(keys, keys.integer("n_shared_experts"))
    return FUSED_AND_PERSISTENT | shared | {"rotary_interleaved": True}


def _tiny(o: TinyOptions) -> dict[str, Any]:
    return {
        "moe_num_experts": o.num_experts,
        "moe_k": o.topk,
        "moe_intermediate_size": o.moe_intermediate_size,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    }


ERNIE4_5_MOE = Family(
    Table(
        (
            INPUT_NORM,
            *HEADS,
            MLP_NORM,
            *DENSE_MLP,
            router(),
            expert_bias("mlp.moe_statics.e_score_correction_bias", unsqueezed=True),
            *experts(),
            *SHARED_EXPERTS,
        )
    ),
    _transformer,
    SILU
    | {
        "use_bias": (False, False),
        "moe_layer_interval": (1, 1),
        "rope_is_neox_style": (False, False),
        "routed_scaling_factor": (1.0, 1.0),
    },
    attribute_map={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
    },
    conflicts=_conflicts,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "routed_scaling_factor": 1.0},
    layers="softmax_expert_bias",
    refused_overrides={
        "moe_z_loss_coeff": "its loss would be of the odds of a softmax, not of logits"
    },
    serves_tied=True,
    lora=True,
    peft_fuses_experts=True,
    tiny={"ernie4_5_moe": TinyModel("Ernie4_5_Moe", _tiny)},
)


def serve_on_cpu() -> None:
    """Give SGLang's choice of experts the biases [1, E] as [E], as its kernels take them."""
    from sglang.srt.layers.moe import topk

    original = topk.fused_topk_torch_native

    def choose(hidden_states, gating_output, topk, renormalize, correction_bias=None, **named):
        bias = None if correction_bias is None else correction_bias.flatten()
        return original(hidden_states, gating_output, topk, renormalize, bias, **named)

    expects = (
        "(hidden_states, gating_output, topk, renormalize, correction_bias=None,"
        " scoring_func='softmax')"
    )
    why = "it takes biases of one axis"
    patch(topk, "fused_topk_native", choose, expects=expects, why=why)

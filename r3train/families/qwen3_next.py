"""Qwen3-Next: three layers of a gated delta net to one of gated attention, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from r3train.families.family import SILU, Config, Family, linear_layers
from r3train.families.qwen2_moe import qwen2_moe
from r3train.families.rows import (
    ATTENTION,
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    HEADS,
    INPUT_NORM,
    MLP_NORM,
    experts,
    qk_norms,
    router,
    row,
    vector,
)
from r3train.families.transformer import Fields, Keys, part_of_heads_rotates
from r3train.families.weights import DiskTensor, Table, Weight

_LINEAR, _FULL = ("linear",), ("full",)
_KEYS, _VALUES = "linear_keys*linear_key", "linear_heads*linear_value"
# rows of a delta net's input: queries, keys, values, output gates z, step sizes b, decays a
_SIX = {
    **{"q": _KEYS, "k": _KEYS, "v": _VALUES, "z": _VALUES},
    **{"b": "linear_heads", "a": "linear_heads"},
}


def delta_net(*inputs: DiskTensor) -> tuple[Weight, ...]:
    """A layer of linear attention, whose input projection is ``inputs`` on disk."""
    here, disk = ATTENTION, "linear_attn."
    conv = {part: _SIX[part] for part in "qkv"}
    return (
        Weight(f"{here}in_proj.weight", inputs, _SIX, ("hidden",), "rows", layers=_LINEAR),
        Weight(
            f"{here}conv1d.weight",
            (DiskTensor(f"{disk}conv1d.weight"),),
            conv,
            (1, "kernel"),
            "rows",
            layers=_LINEAR,
        ),
        vector(f"{here}A_log", f"{disk}A_log", "linear_heads", sharded="rows", layers=_LINEAR),
        vector(f"{here}dt_bias", f"{disk}dt_bias", "linear_heads", sharded="rows", layers=_LINEAR),
        vector(f"{here}out_norm.weight", f"{disk}norm.weight", "linear_value", layers=_LINEAR),
        row(
            f"{here}out_proj.weight",
            f"{disk}out_proj.weight",
            _VALUES,
            layers=_LINEAR,
            lora=False,
        ),
    )


# a head of q_proj is [query; gate]
GATED_QKV = Weight(
    f"{ATTENTION}linear_qkv.weight",
    (
        DiskTensor("self_attn.q_proj.weight", ("q", "gate"), "heads"),
        DiskTensor("self_attn.k_proj.weight", ("k",)),
        DiskTensor("self_attn.v_proj.weight", ("v",)),
    ),
    {"q": "heads*head", "gate": "heads*head", "k": "kv_heads*head", "v": "kv_heads*head"},
    ("hidden",),
    "rows",
    "kv_heads",
    layers=_FULL,
    lora=True,
)
# of a layer but its delta net and its experts
HYBRID = (
    *(INPUT_NORM, GATED_QKV, replace(HEADS[1], layers=_FULL), *qk_norms(layers=_FULL)),
    *(MLP_NORM, router(), *GATED_SHARED_EXPERT),
)


def hybrid_conflicts(config: Config) -> Iterator[str]:
    """SGLang reads full_attention_interval and partial_rotary_factor, transformers other keys."""
    rope = config.get("rope_parameters") or {}
    served = config.get("partial_rotary_factor", 0.25)
    part = rope.get("partial_rotary_factor", served)
    if part != served:
        yield (
            f"partial_rotary_factor is {part} in rope_parameters, and SGLang rotates {served} of a head:"
            f" write it at the top of config.json too"
        )
    kinds = config.get("layer_types")
    if kinds is not None and [kind == "linear_attention" for kind in kinds] != linear_layers(
        config
    ):
        yield (
            f"layer_types {kinds} is not what SGLang takes from full_attention_interval"
            f" {config.get('full_attention_interval')!r}"
        )


_LINEAR_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)


def hybrid(keys: Keys) -> Fields:
    """Return the fields of layers of two kinds, with Qwen2-MoE's experts."""
    return (
        qwen2_moe(keys)
        | {
            "add_qkv_bias": False,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "apply_rope_fusion": False,
        }
        | {name: keys[name] for name in _LINEAR_SIZES}
    )


QWEN3_NEXT = Family(
    Table(
        (
            *HYBRID,
            *delta_net(
                DiskTensor("linear_attn.in_proj_qkvz.weight", tuple("qkvz"), "linear_keys"),
                DiskTensor("linear_attn.in_proj_ba.weight", tuple("ba"), "linear_keys"),
            ),
            *experts(),
            *DENSE_MLP,
        )
    ),
    hybrid,
    SILU | {"attention_bias": (False, False), "mlp_only_layers": ([], [])},
    alone={"context_parallel_size": "its linear attention is not cut over ranks"},
    whole_heads={
        "num_key_value_heads": "the gate of its attention is cut between key heads",
        "linear_num_key_heads": "its linear attention is cut between heads",
    },
    conflicts=hybrid_conflicts,
    defaults={
        **{"norm_topk_prob": True, "head_dim": 256, "linear_conv_kernel_dim": 4},
        "partial_rotary_factor": 0.25,
    },
    rotary=part_of_heads_rotates,
    layers="gated_delta_net",
    unfused_rope="this model was verified with Megatron's own layers only",
)

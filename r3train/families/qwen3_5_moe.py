"""Qwen3.5-MoE's language model: Qwen3-Next's layers, four input projections, fused experts on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from r3train.config.lora_settings import LINEARS
from r3train.families.family import Config
from r3train.families.qwen3_next import (
    FULL_EVERY_FOURTH,
    HYBRID,
    QWEN3_NEXT,
    delta_net,
    hybrid,
    hybrid_conflicts,
    tiny_hybrid,
)
from r3train.families.weight_rows import fused_experts
from r3train.families.tiny_options import (
    HALF_ROTATED,
    TinyModel,
    TinyOptions,
    positions_on_three_axes,
    vision,
)
from r3train.families.transformer import Fields, Keys
from r3train.families.weights import DiskTensor, Table
from r3train.patches import patch


def _conflicts(config: Config) -> Iterator[str]:
    yield from hybrid_conflicts(config)
    gate = config.get("output_gate_type")
    if gate not in (None, "silu", "swish"):
        yield (
            f"output_gate_type is {gate!r}, expected 'silu' or 'swish': the actor and transformers"
            " gate the output of linear attention by no other function"
        )


_INPUTS = (
    DiskTensor("linear_attn.in_proj_qkv.weight", tuple("qkv")),
    *(DiskTensor(f"linear_attn.in_proj_{part}.weight", (part,)) for part in "zba"),
)


def _transformer(keys: Keys) -> Fields:
    # it has no dense layers
    return hybrid(keys) | {"ffn_hidden_size": keys["moe_intermediate_size"]}


def _tiny(o: TinyOptions) -> dict[str, Any]:
    # half of a head is rotated, by pairs of numbers
    rope = HALF_ROTATED | positions_on_three_axes(o.head_dim // 4)
    return tiny_hybrid(o) | {"rope_parameters": rope}


QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    weights=Table(
        (
            *HYBRID,
            *delta_net(*_INPUTS),
            *fused_experts(alternate=False, transposed=False),
        ),
        prefix="model.language_model",
    ),
    transformer=_transformer,
    needs=QWEN3_NEXT.needs
    | {
        "norm_topk_prob": (True, True),
        "attn_output_gate": (True, True),
        "tie_word_embeddings": (False, False),
    },
    conflicts=_conflicts,
    peft_fuses_experts=False,
    unread_by_peft=dict.fromkeys(
        LINEARS, "transformers' language model has other names, of which PEFT loads none"
    ),
    tiny={
        "qwen3_5_moe": TinyModel(
            "Qwen3_5Moe",
            _tiny,
            FULL_EVERY_FOURTH,
            vision=vision,
            experts="together",
            recipe_version=2,
        )
    },
)


def serve_on_cpu() -> None:
    """Take the input projections apart, and put attention's output under its gate."""
    import torch
    from sglang.srt.models import qwen3_5

    def unpack(*args):
        return tuple(x.contiguous() for x in qwen3_5.qwen3_5_gdn_prefill_projection_views(*args))

    def gated(x, gate, inplace=False):
        out = x * torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype)
        return x.copy_(out) if inplace else out

    sizes = "num_heads_qk, num_heads_v, head_qk, head_v"
    for name, replacement, expects in (
        (
            "fused_qkvzba_split_reshape_cat_contiguous",
            unpack,
            f"(mixed_qkvz, mixed_ba, {sizes})",
        ),
        ("fused_sigmoid_mul", gated, "(attn_output, gate, inplace=False, quant=False)"),
    ):
        patch(qwen3_5, name, replacement, expects=expects, why="it is a triton kernel")

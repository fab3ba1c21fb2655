"""Qwen3-VL-MoE's language model: Qwen3-MoE's layers, fused experts on disk with their inputs as the first axis.

The position of a text's token is the same on the three axes of its rotary embedding, which is then the plain one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3train.families.qwen3 import QWEN3
from r3train.families.qwen3_moe import QWEN3_MOE, tiny_qwen3_moe
from r3train.families.weight_rows import fused_experts, router
from r3train.families.tiny_options import TinyModel, TinyOptions, positions_on_three_axes, vision
from r3train.families.weights import Table


def _tiny(o: TinyOptions) -> dict[str, Any]:
    width = o.moe_intermediate_size
    if (
        2 * width == o.hidden_size
    ):  # transformers tells by a matrix's shape which of its axes is the first
        width += width // 2
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return tiny_qwen3_moe(o) | {
        "moe_intermediate_size": width,
        "rope_parameters": rope | positions_on_three_axes(o.head_dim // 2),
    }


def _vision(o: TinyOptions) -> dict[str, Any]:
    return vision(o, deepstack_visual_indexes=[0])


QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    weights=Table(
        (
            *QWEN3.weights.layer_weights,
            router(),
            *fused_experts(alternate=False, transposed=True),
        ),
        prefix="model.language_model",
    ),
    # transformers normalises without asking
    needs=QWEN3_MOE.needs | {"norm_topk_prob": (True, True), "tie_word_embeddings": (False, False)},
    defaults={"rope_theta": 500000.0},
    fp8_served=False,
    tiny={"qwen3_vl_moe": TinyModel("Qwen3VLMoe", _tiny, vision=_vision, experts="turned")},
)

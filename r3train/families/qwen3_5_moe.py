"""Qwen3.5-MoE's language model: Qwen3-Next's layers, four input projections, fused experts on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from r3train.families.family import Config
from r3train.families.qwen3_next import HYBRID, QWEN3_NEXT, delta_net, hybrid, hybrid_conflicts
from r3train.families.rows import fused_experts
from r3train.families.transformer import Fields, Keys
from r3train.families.weights import DiskTensor, Table


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


QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    weights=Table(
        (
            *(*HYBRID, *delta_net(*_INPUTS)),
            *fused_experts(alternate=False, transposed=False, lora=False),
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
)

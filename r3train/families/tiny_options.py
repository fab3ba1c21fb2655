"""Tiny models of families: the options that all take, and what a family says of its own.

Source of the published keys: the families' own config.json files, as SGLang 0.5.23 reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TinyOptions:
    """Shape and seed of the checkpoint; a qwen3_moe with num_experts 0 is a dense qwen3."""

    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_experts: int = 8
    topk: int = 2
    moe_intermediate_size: int = 32
    vocab_size: int = 64
    max_position_embeddings: int = 512
    initializer_range: float = 0.1
    dtype: str = "float32"
    seed: int = 0
    task: str = "words"  # or calculator, for --environment calculator
    family: str = "qwen3_moe"


# --size: what it changes.  gpu: of shapes that kernels are made for, as published models have them (a head of 128,
# experts of 128 columns, 8 of 64), in 4 layers of 28 MB each; a toy of 16 a head fails, or passes, for reasons of its own
SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "gpu": {
        "hidden_size": 512,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 128,
        "num_experts": 64,
        "topk": 8,
        "moe_intermediate_size": 128,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
}


def no_keys(o: TinyOptions) -> dict[str, Any]:
    """Return no keys."""
    return {}


@dataclass(frozen=True)
class TinyModel:
    """A tiny model of a family.

    ``kind``: of transformers' classes, the name before Config and ForCausalLM.  ``sizes``: the
    configuration next to what all families share.  ``published``: keys of a published config.json that
    transformers does not save, and SGLang reads.  ``option_keys``: those of them that follow from the options.
    ``vision``: of a model of text and images, which has all
    these in text_config, the keys next to that: of its vision tower, and others, which are written as they are.  ``experts``: how published files hold them, where
    transformers saves them otherwise: "together", all of a layer in one tensor, or "turned", the first axis of their
    matrices the inputs.  ``names``: what names begin with as transformers saves them -> in published files.  ``recipe_version`` is raised when the same options give other files.
    """

    kind: str
    sizes: Callable[[TinyOptions], dict[str, Any]]
    published: Mapping[str, Any] = field(default_factory=dict)
    vision: Callable[[TinyOptions], dict[str, Any]] | None = None
    experts: Literal["", "together", "turned"] = ""
    names: Mapping[str, str] = field(default_factory=dict)
    option_keys: Callable[[TinyOptions], dict[str, Any]] = no_keys
    recipe_version: int = 1


def shared(o: TinyOptions) -> dict[str, Any]:
    """The configuration that all families have."""
    return {
        "vocab_size": o.vocab_size,
        "hidden_size": o.hidden_size,
        "intermediate_size": 2 * o.hidden_size,
        "num_hidden_layers": o.num_layers,
        "num_attention_heads": o.num_heads,
        "num_key_value_heads": o.num_kv_heads,
        "max_position_embeddings": o.max_position_embeddings,
        "initializer_range": o.initializer_range,
        "tie_word_embeddings": False,
    }


def with_experts(o: TinyOptions, count: str = "num_experts", **more: Any) -> dict[str, Any]:
    """Return the keys of experts as most families have them; count: the key of their number."""
    sizes = {count: o.num_experts, "num_experts_per_tok": o.topk}
    return sizes | {"moe_intermediate_size": o.moe_intermediate_size} | more


def with_local_experts(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Return the keys of experts as Mixtral and its heirs have them."""
    sizes = {"num_local_experts": o.num_experts, "num_experts_per_tok": o.topk}
    return sizes | {"intermediate_size": o.moe_intermediate_size} | more


def positions_on_three_axes(pairs: int) -> dict[str, Any]:
    """Return the keys by which so many pairs of a head's numbers rotate with time, height and width."""
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {"mrope_section": sections, "mrope_interleaved": True}


def vision(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Return the keys of the vision tower that Qwen's models have."""
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    sizes |= {"out_hidden_size": o.hidden_size, "num_position_embeddings": 16}
    return {"vision_config": sizes | more}


# positions by which a half of every head is rotated
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

"""Configurations of tiny models, one a family: what transformers builds, and what is published next to it.

Source of the published keys: the families' own config.json files, as SGLang 0.5.23 reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TinyOptions:
    """Shape and seed of the checkpoint; a model with num_experts 0 is dense (qwen3_moe only)."""

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


@dataclass(frozen=True)
class TinyFamily:
    """A family's tiny model.

    ``kind``: of transformers' classes, the name before Config and ForCausalLM.  ``sizes``: the
    configuration next to what all families share.  ``published``: keys of a published config.json that
    transformers does not save, and SGLang reads.  ``vision``: of a model of text and images, which has all
    these in text_config, the sizes of its vision tower.  ``recipe_version`` is raised when the same options
    give other files.
    """

    kind: str
    sizes: Callable[[TinyOptions], dict[str, Any]]
    published: Mapping[str, Any] = field(default_factory=dict)
    vision: Callable[[TinyOptions], dict[str, Any]] | None = None
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


def _experts(o: TinyOptions, count: str = "num_experts", **more: Any) -> dict[str, Any]:
    """Experts as most families have them; count: the key of their number."""
    sizes = {count: o.num_experts, "num_experts_per_tok": o.topk}
    return sizes | {"moe_intermediate_size": o.moe_intermediate_size} | more


def _local_experts(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Experts as Mixtral and its heirs have them."""
    sizes = {"num_local_experts": o.num_experts, "num_experts_per_tok": o.topk}
    return sizes | {"intermediate_size": o.moe_intermediate_size} | more


def _qwen3_moe(o: TinyOptions) -> dict[str, Any]:
    more = dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return _experts(o, head_dim=o.head_dim, **more)


def _qwen2_moe(o: TinyOptions) -> dict[str, Any]:
    shared_size = o.moe_intermediate_size * 3 // 2
    return _experts(o, shared_expert_intermediate_size=shared_size, norm_topk_prob=False)


def _mixtral(o: TinyOptions) -> dict[str, Any]:
    return _local_experts(o, head_dim=None)  # published so


def _olmoe(o: TinyOptions) -> dict[str, Any]:
    return {
        "num_key_value_heads": o.num_heads,
        "intermediate_size": o.moe_intermediate_size,
        "num_experts": o.num_experts,
        "num_experts_per_tok": o.topk,
        "norm_topk_prob": False,
    }


def _glm4_moe(o: TinyOptions) -> dict[str, Any]:
    return _experts(
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


_YARN = {
    **{
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    **{"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 128},
}
_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# published of families in which every fourth layer has full attention
_FULL_EVERY_FOURTH = {"full_attention_interval": 4, "partial_rotary_factor": 0.5}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}


def _latent(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Multi-head latent attention, shared experts, the first layer dense."""
    sizes = _experts(o, "n_routed_experts", norm_topk_prob=True, num_mtp_layers=0)
    return sizes | {
        "num_key_value_heads": o.num_heads,
        "kv_lora_rank": 2 * o.head_dim,
        "qk_nope_head_dim": o.head_dim,
        "qk_rope_head_dim": o.head_dim // 2,
        "v_head_dim": o.head_dim,
        "q_lora_rank": o.head_dim + o.head_dim // 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **more,
    }


def _moonlight(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Queries as they are, plain positions, one group, two shared experts."""
    own = dict(q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=2.446)
    return _latent(o) | _ONE_GROUP | own | more


def _deepseek_v2(o: TinyOptions) -> dict[str, Any]:
    """Moonlight with yarn, and the gates of a softmax."""
    gates = dict(norm_topk_prob=False, routed_scaling_factor=1.0, topk_method="greedy")
    return _moonlight(o, rope_parameters=_YARN, **gates)


def _deepseek_v3(o: TinyOptions) -> dict[str, Any]:
    """Compressed queries, yarn, groups of experts."""
    in_groups = o.topk % 2 == 0 and o.num_experts % o.topk == 0 and o.topk < o.num_experts
    groups = {"n_group": o.topk, "topk_group": o.topk // 2} if in_groups else _ONE_GROUP
    return _latent(o, routed_scaling_factor=2.5, rope_parameters=_YARN, **groups)


def _kimi_k2(o: TinyOptions) -> dict[str, Any]:
    """DeepSeek-V3 with one group."""
    return _deepseek_v3(o) | _ONE_GROUP | {"routed_scaling_factor": 2.827}


def _glm4_moe_lite(o: TinyOptions) -> dict[str, Any]:
    kinds = ["dense"] + ["sparse"] * (o.num_layers - 1)
    sizes = _latent(o, routed_scaling_factor=1.8, mlp_layer_types=kinds, **_ONE_GROUP)
    del sizes["num_mtp_layers"], sizes["first_k_dense_replace"]
    # transformers normalises compressed queries and keys with 1e-6 whatever is set here
    return sizes | {"rms_norm_eps": 1e-6}


def _minimax_m2(o: TinyOptions) -> dict[str, Any]:
    rotary = {"rotary_dim": o.head_dim // 2, "rope_parameters": dict(_HALF_ROTATED)}
    return _local_experts(o, head_dim=o.head_dim, **rotary)


def _gpt_oss(o: TinyOptions) -> dict[str, Any]:
    rope = {
        **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 128},
    }
    return _local_experts(o, head_dim=o.head_dim, sliding_window=8, rope_parameters=rope)


def _qwen3_next(o: TinyOptions) -> dict[str, Any]:
    layers = range(1, o.num_layers + 1)
    return _qwen3_moe(o) | {
        "shared_expert_intermediate_size": o.moe_intermediate_size,
        "linear_num_key_heads": o.num_kv_heads,
        "linear_num_value_heads": 2 * o.num_kv_heads,
        "linear_key_head_dim": o.head_dim,
        "linear_value_head_dim": o.head_dim,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": dict(_HALF_ROTATED),
        "layer_types": ["linear_attention" if i % 4 else "full_attention" for i in layers],
    }


def _qwen3_5_moe(o: TinyOptions) -> dict[str, Any]:
    pairs = o.head_dim // 4  # half of a head is rotated, by pairs of numbers
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    rope = _HALF_ROTATED | {"mrope_section": sections, "mrope_interleaved": True}
    return _qwen3_next(o) | {"rope_parameters": rope}


def _vision(o: TinyOptions) -> dict[str, Any]:
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    return sizes | {"out_hidden_size": o.hidden_size, "num_position_embeddings": 16}


TINY_FAMILIES: dict[str, TinyFamily] = {
    "qwen3_moe": TinyFamily("Qwen3Moe", _qwen3_moe),
    "qwen2_moe": TinyFamily("Qwen2Moe", _qwen2_moe),
    "mixtral": TinyFamily("Mixtral", _mixtral),
    "olmoe": TinyFamily("Olmoe", _olmoe),
    "glm4_moe": TinyFamily("Glm4Moe", _glm4_moe),
    "deepseek_v2": TinyFamily(
        "DeepseekV2", _deepseek_v2, {"scoring_func": "softmax", "moe_layer_freq": 1}
    ),
    "moonlight": TinyFamily("DeepseekV3", _moonlight, _SIGMOID),
    "deepseek_v3": TinyFamily("DeepseekV3", _deepseek_v3, _SIGMOID),
    "kimi_k2": TinyFamily("DeepseekV3", _kimi_k2, _SIGMOID | {"model_type": "kimi_k2"}),
    "qwen3_next": TinyFamily("Qwen3Next", _qwen3_next, _FULL_EVERY_FOURTH, recipe_version=2),
    "qwen3_5_moe": TinyFamily(
        "Qwen3_5Moe", _qwen3_5_moe, _FULL_EVERY_FOURTH, vision=_vision, recipe_version=2
    ),
    "gpt_oss": TinyFamily("GptOss", _gpt_oss, recipe_version=2),
    "minimax_m2": TinyFamily(
        "MiniMaxM2",
        _minimax_m2,
        {
            **{"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
            **{"qk_norm_type": "per_layer", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe_lite": TinyFamily(
        "Glm4MoeLite", _glm4_moe_lite, _SIGMOID | {"first_k_dense_replace": 1}
    ),
}

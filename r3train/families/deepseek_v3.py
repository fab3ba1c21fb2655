"""DeepSeek-V3 and R1, Moonlight: latent attention, sigmoid gates with expert biases, shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from r3train.families.family import SILU, Config, Family
from r3train.families.weight_rows import (
    ATTENTION,
    DENSE_MLP,
    INPUT_NORM,
    MLP_NORM,
    SHARED_EXPERTS,
    column,
    expert_bias,
    experts,
    router,
    row,
    vector,
    whole,
)
from r3train.families.tiny_options import TinyModel, TinyOptions, with_experts
from r3train.families.transformer import FUSED_AND_PERSISTENT, Fields, Keys, sigmoid_and_shared
from r3train.families.weights import Table

_COMPRESSED = ("q_rank",)
# SGLang loads these two of a layer as one tensor, forgets one that comes alone, and answers success
_DOWN = dict(lora=True, bundle="down projections")
_QUERIES = "heads*nope+heads*rope"

LATENT_ATTENTION = (
    replace(INPUT_NORM, te_name=""),  # Transformer Engine's layers have it apart too
    column(
        f"{ATTENTION}linear_q_proj.weight",
        "self_attn.q_proj.weight",
        _QUERIES,
        layers=("no_q_rank",),
    ),
    whole(
        f"{ATTENTION}linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        "q_rank",
        layers=_COMPRESSED,
        **_DOWN,
    ),
    vector(
        f"{ATTENTION}q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "q_rank",
        te_name=f"{ATTENTION}linear_q_up_proj.layer_norm_weight",
        layers=_COMPRESSED,
    ),
    column(
        f"{ATTENTION}linear_q_up_proj.weight",
        "self_attn.q_b_proj.weight",
        _QUERIES,
        "q_rank",
        layers=_COMPRESSED,
    ),
    whole(
        f"{ATTENTION}linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "latent+rope",
        **_DOWN,
    ),
    vector(
        f"{ATTENTION}kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "latent",
        te_name=f"{ATTENTION}linear_kv_up_proj.layer_norm_weight",
    ),
    column(
        f"{ATTENTION}linear_kv_up_proj.weight",
        "self_attn.kv_b_proj.weight",
        "heads*nope+heads*value",
        "latent",
    ),
    row(f"{ATTENTION}linear_proj.weight", "self_attn.o_proj.weight", "heads*value"),
    MLP_NORM,
)


def _conflicts(config: Config) -> Iterator[str]:
    topk, groups = config.get("num_experts_per_tok"), config.get("topk_group")
    if (config.get("n_group") or 1) > 1 and topk != 2 * (groups or 1):
        yield (
            f"num_experts_per_tok is {topk} and topk_group {groups}, expected twice as many experts as"
            " groups: Megatron ranks per group by its best num_experts_per_tok // topk_group experts,"
            " SGLang by its best two"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    if scales[0] != scales[1] or not scales[0]:
        yield (
            f"yarn with mscale {scales[0]} and mscale_all_dim {scales[1]}: expected two equal numbers"
            " above 0; the actor scales attention by the first, transformers by the second"
        )


def deepseek_v3(keys: Keys) -> Fields:
    """Return the fields of latent attention, its positions, and experts in groups."""
    rope, groups = keys.rope, keys.integer_or_null("n_group", 1)
    yarn = rope["rope_type"] == "yarn"
    fields = {
        "qk_layernorm": True,
        "disable_bf16_reduced_precision_matmul": True,
        "kv_channels": keys["qk_rope_head_dim"],
        "q_lora_rank": keys.get("q_lora_rank"),
        "kv_lora_rank": keys["kv_lora_rank"],
        "qk_head_dim": keys["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": keys["qk_rope_head_dim"],
        "v_head_dim": keys["v_head_dim"],
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"] if yarn else 1.0,
        "mscale": rope.get("mscale", 1.0) if yarn else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0) if yarn else 1.0,
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
    }
    if groups > 1:
        fields["moe_router_num_groups"] = groups
        fields["moe_router_group_topk"] = keys.integer("topk_group")
    shared = sigmoid_and_shared(keys, keys.integer("n_shared_experts"))
    return FUSED_AND_PERSISTENT | shared | fields


TINY_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
# published, and not saved by transformers
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def tiny_latent(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Return the keys of latent attention and shared experts, the first layer dense."""
    sizes = with_experts(o, "n_routed_experts", norm_topk_prob=True, num_mtp_layers=0)
    return sizes | {
        "num_key_value_heads": o.num_heads,
        "kv_lora_rank": (4 if o.head_dim == 128 else 2) * o.head_dim,  # 512 as published
        "qk_nope_head_dim": o.head_dim,
        "qk_rope_head_dim": o.head_dim // 2,
        "v_head_dim": o.head_dim,
        "q_lora_rank": o.head_dim + o.head_dim // 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **more,
    }


def tiny_moonlight(o: TinyOptions, **more: Any) -> dict[str, Any]:
    """Return the keys with queries as they are, plain positions, one group, two shared experts."""
    sizes = dict(q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=2.446)
    return tiny_latent(o) | ONE_GROUP | sizes | more


def tiny_deepseek_v3(o: TinyOptions) -> dict[str, Any]:
    """Return the keys with compressed queries, yarn, groups of experts."""
    in_groups = o.topk % 2 == 0 and o.num_experts % o.topk == 0 and o.topk < o.num_experts
    groups = {"n_group": o.topk, "topk_group": o.topk // 2} if in_groups else ONE_GROUP
    return tiny_latent(o, routed_scaling_factor=2.5, rope_parameters=TINY_YARN, **groups)


DEEPSEEK_V3 = Family(
    Table(
        (
            *LATENT_ATTENTION,
            *DENSE_MLP,
            router(),
            expert_bias("mlp.gate.e_score_correction_bias"),
            *experts(),
            *SHARED_EXPERTS,
        )
    ),
    deepseek_v3,
    SILU
    | {
        "norm_topk_prob": (True, True),
        "attention_bias": (False, False),
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
        "rope_interleave": (True, True),
    },
    rope_types=("yarn",),
    conflicts=_conflicts,
    layers="latent_attention",
    refused_overrides={
        "apply_rope_fusion": "Megatron's fused kernel for latent attention is experimental, and was not"
        " verified here"
    },
    lora=True,
    adapters_served=True,
    fp8_served=True,
    peft_fuses_experts=True,
    tiny={
        "moonlight": TinyModel("DeepseekV3", tiny_moonlight, SIGMOID),
        "deepseek_v3": TinyModel("DeepseekV3", tiny_deepseek_v3, SIGMOID),
    },
)

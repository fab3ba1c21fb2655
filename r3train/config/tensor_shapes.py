"""Shapes of a checkpoint's tensors, as its config.json has them.

A size that config.json leaves to a default of transformers is not guessed: it is None, and any number
will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from r3train.config.families import tensor_names
from r3train.config.hf_facts import HfModelFacts, load_model_config

Shape = tuple[int | None, ...]

# what follows "model.layers.N." -> names of sizes, see ``_sizes``; a number stands for itself
_LAYER: dict[str, tuple[str | int, ...]] = {
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("queries", "hidden"),
    "self_attn.k_proj.weight": ("keys", "hidden"),
    "self_attn.v_proj.weight": ("keys", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "answers"),
    "self_attn.q_proj.bias": ("queries",),
    "self_attn.k_proj.bias": ("keys",),
    "self_attn.v_proj.bias": ("keys",),
    "self_attn.o_proj.bias": ("hidden",),
    "self_attn.q_norm.weight": ("query_norm",),
    "self_attn.k_norm.weight": ("key_norm",),
    "self_attn.sinks": ("heads",),
    "self_attn.q_a_proj.weight": ("query_rank", "hidden"),
    "self_attn.q_a_layernorm.weight": ("query_rank",),
    "self_attn.q_b_proj.weight": ("queries", "query_rank"),
    "self_attn.kv_a_proj_with_mqa.weight": ("latent_and_rope", "hidden"),
    "self_attn.kv_a_layernorm.weight": ("latent",),
    "self_attn.kv_b_proj.weight": ("keys_and_values", "latent"),
    "linear_attn.in_proj_qkvz.weight": ("linear_qkvz", "hidden"),
    "linear_attn.in_proj_ba.weight": ("linear_ba", "hidden"),
    "linear_attn.in_proj_qkv.weight": ("linear_qkv", "hidden"),
    "linear_attn.in_proj_z.weight": ("linear_values", "hidden"),
    "linear_attn.in_proj_b.weight": ("linear_heads", "hidden"),
    "linear_attn.in_proj_a.weight": ("linear_heads", "hidden"),
    "linear_attn.out_proj.weight": ("hidden", "linear_values"),
    "linear_attn.conv1d.weight": ("linear_qkv", 1, "linear_kernel"),
    "linear_attn.norm.weight": ("linear_value_head",),
    "linear_attn.A_log": ("linear_heads",),
    "linear_attn.dt_bias": ("linear_heads",),
    "mlp.gate.e_score_correction_bias": ("experts",),
    "block_sparse_moe.e_score_correction_bias": ("experts",),
    "mlp.router.bias": ("experts",),
    "mlp.shared_expert_gate.weight": (1, "hidden"),
    "mlp.experts.gate_up_proj": ("experts", "hidden", "two_experts"),
    "mlp.experts.gate_up_proj_bias": ("experts", "two_experts"),
    "mlp.experts.down_proj": ("experts", "expert", "hidden"),
    "mlp.experts.down_proj_bias": ("experts", "hidden"),
} | {
    f"{router}.weight": ("experts", "hidden")
    for router in ("mlp.gate", "mlp.router", "block_sparse_moe.gate")
}
for _room, _size in (
    ("mlp", "mlp"),
    ("mlp.shared_expert", "shared_expert"),
    ("mlp.shared_experts", "shared_experts"),
    ("mlp.experts.N", "expert"),
):
    _LAYER |= {f"{_room}.{name}_proj.weight": (_size, "hidden") for name in ("gate", "up")}
    _LAYER[f"{_room}.down_proj.weight"] = ("hidden", _size)
_LAYER |= {f"block_sparse_moe.experts.N.w{i}.weight": ("expert", "hidden") for i in (1, 3)}
_LAYER["block_sparse_moe.experts.N.w2.weight"] = ("hidden", "expert")
# the last two words of the name
_WHOLE = {
    "embed_tokens.weight": ("vocabulary", "hidden"),
    "lm_head.weight": ("vocabulary", "hidden"),
    "norm.weight": ("hidden",),
}
# as a linear layer has them; gpt-oss has them transposed
_EXPERTS_AS_LINEAR = {
    "mlp.experts.gate_up_proj": ("experts", "two_experts", "hidden"),
    "mlp.experts.down_proj": ("experts", "hidden", "expert"),
}
# families that normalise all heads together
_WIDE_NORMS = ("olmoe", "minimax_m2")
# families whose heads share the hidden size where config.json has no head_dim
_HEADS_SHARE = ("mixtral", "olmoe", "qwen2_moe")


def tensor_shapes(hf: HfModelFacts) -> dict[str, Shape]:
    """Return the shape of every tensor of ``tensor_names``, for a verified family."""
    sizes = _sizes(hf, load_model_config(hf.path))

    def shape(names: tuple[str | int, ...]) -> Shape:
        return tuple(name if isinstance(name, int) else sizes[name] for name in names)

    whole = {name: shape(names) for name, names in _WHOLE.items()}
    of_layers = _LAYER | (_EXPERTS_AS_LINEAR if hf.model_type == "qwen3_5_moe" else {})
    layer = {name: shape(names) for name, names in of_layers.items()}
    found = {}
    for name in tensor_names(hf):
        _, in_layer, rest = name.partition(".layers.")
        if not in_layer:
            found[name] = whole[".".join(name.split(".")[-2:])]
            continue
        words = rest.split(".")[1:]
        found[name] = layer[".".join("N" if word.isdecimal() else word for word in words)]
    return found


def fits(shape: tuple[int, ...], expected: Shape) -> bool:
    """Return True for a shape that has every size that is known."""
    return len(shape) == len(expected) and all(
        size is None or size == got for got, size in zip(shape, expected)
    )


def _sizes(hf: HfModelFacts, content: Mapping[str, Any]) -> dict[str, int | None]:
    """Map each name of a size to its number; None where config.json does not say it."""

    def given(key: str) -> int | None:
        value = content.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def times(*factors: int | None) -> int | None:
        return None if None in factors else prod(factors)

    def plus(*parts: int | None) -> int | None:
        return None if None in parts else sum(parts)

    heads, head = hf.num_attention_heads, given("head_dim")
    if head is None and hf.model_type in _HEADS_SHARE:
        head = hf.hidden_size // heads
    queries = answers = times(heads, head)
    keys = times(hf.num_key_value_heads, head)
    latent, rope = given("kv_lora_rank"), given("qk_rope_head_dim")
    plain, values = given("qk_nope_head_dim"), given("v_head_dim")
    if latent is not None:
        queries, answers = times(heads, plus(plain, rope)), times(heads, values)
    if hf.model_type in ("qwen3_next", "qwen3_5_moe"):  # with a gate as wide as the queries
        queries = times(2, queries)
    expert = given("moe_intermediate_size")
    if hf.model_type in ("mixtral", "minimax_m2", "olmoe", "gpt_oss"):
        expert = given("intermediate_size")
    linear_heads, value_head = given("linear_num_value_heads"), given("linear_value_head_dim")
    linear_keys = times(given("linear_num_key_heads"), given("linear_key_head_dim"))
    linear_values = times(linear_heads, value_head)
    wide = hf.model_type in _WIDE_NORMS
    return {
        "hidden": hf.hidden_size,
        "vocabulary": hf.vocab_size,
        "heads": heads,
        "queries": queries,
        "answers": answers,
        "keys": keys,
        "query_norm": queries if wide else head,
        "key_norm": keys if wide else head,
        "query_rank": given("q_lora_rank"),
        "latent": latent,
        "latent_and_rope": plus(latent, rope),
        "keys_and_values": times(heads, plus(plain, values)),
        "linear_qkvz": plus(times(2, linear_keys), times(2, linear_values)),
        "linear_qkv": plus(times(2, linear_keys), linear_values),
        "linear_ba": times(2, linear_heads),
        "linear_values": linear_values,
        "linear_kernel": given("linear_conv_kernel_dim"),
        "linear_value_head": value_head,
        "linear_heads": linear_heads,
        "experts": hf.num_experts,
        "expert": expert,
        "two_experts": times(2, expert),
        "mlp": given("intermediate_size"),
        "shared_expert": given("shared_expert_intermediate_size"),
        "shared_experts": times(expert, given("n_shared_experts")),
    }

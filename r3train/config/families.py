"""Model families whose numbers were held against transformers; every other one is refused by name.

The bridge to Megatron knows more families than these, and builds some of them wrongly without a word.
A family is added here and in ``trainer/megatron/families/``, with a case in
tests/oracle/test_families.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from r3train.config.hf_facts import HfModelFacts, load_json_object
from r3train.config.sources import ConfigError

_ROPE = ("rope_parameters", "rope_scaling")
_MLP = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, as far as it was verified.

    ``needs``: key of config.json -> (its only verified value, the value that transformers takes where
    the key is missing).  The rest are names of tensors: those of every layer, of the router, of one
    expert {e}, of a layer with experts beside these, and of an attention with ``use_qk_norm``.
    """

    needs: Mapping[str, tuple[Any, Any]]
    layer: tuple[str, ...] = ()
    router: str = "mlp.gate.weight"
    expert: tuple[str, ...] = tuple(f"mlp.experts.{{e}}.{name}" for name in _MLP)
    moe_layer: tuple[str, ...] = ()
    always_qk_norm: bool = False


_SILU = {"hidden_act": ("silu", "silu")}
_QWEN3 = _SILU | {"attention_bias": (False, False), "use_sliding_window": (False, False)}
_QKV_BIAS = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")

FAMILIES: dict[str, Family] = {
    "qwen3": Family(_QWEN3, always_qk_norm=True),
    "qwen3_moe": Family(_QWEN3, always_qk_norm=True),
    "qwen2_moe": Family(
        _SILU | {"use_sliding_window": (False, False), "qkv_bias": (True, True)},
        layer=_QKV_BIAS,
        moe_layer=(
            "mlp.shared_expert_gate.weight",
            *(f"mlp.shared_expert.{name}" for name in _MLP),
        ),
    ),
    "mixtral": Family(
        _SILU | {"sliding_window": (None, None), "router_jitter_noise": (0.0, 0.0)},
        router="block_sparse_moe.gate.weight",
        expert=tuple(f"block_sparse_moe.experts.{{e}}.w{i}.weight" for i in (1, 2, 3)),
    ),
    "glm4_moe": Family(
        _SILU
        | {
            "norm_topk_prob": (True, True),
            "n_group": (1, 1),
            "topk_group": (1, 1),
            "n_shared_experts": (1, 1),
            "attention_bias": (True, False),
        },
        layer=_QKV_BIAS,
        moe_layer=(
            "mlp.gate.e_score_correction_bias",
            *(f"mlp.shared_experts.{name}" for name in _MLP),
        ),
    ),
}


def check_family(hf: HfModelFacts) -> None:
    """Raise ConfigError with every reason why the checkpoint's model was not verified."""
    found = list(family_conflicts(hf))
    if found:
        raise ConfigError("\n".join(found))


def family_conflicts(hf: HfModelFacts) -> Iterator[str]:
    """Yield a complaint for a family that nobody verified, and for each key that makes it another."""
    content = load_json_object(hf.path / "config.json")
    family = FAMILIES.get(hf.model_type)
    where = f"{hf.path}/config.json"
    if family is None:
        yield (
            f"{where}: model_type {hf.model_type!r} was not verified against transformers, and would"
            f" be trained wrongly without a word; verified: {', '.join(sorted(FAMILIES))}"
        )
        return
    for key, (verified, default) in family.needs.items():
        value = content.get(key)
        value = default if value is None else value
        if value != verified:
            yield (
                f"{where}: {key} is {value!r}; {hf.model_type} was verified with {verified!r} alone,"
                " and the actor would compute something else"
            )
    for key in _ROPE:
        rope = content.get(key)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
        if kind not in (None, "default"):
            yield (
                f"{where}: {key} has rope_type {kind!r}, and the actor rotates by rope_theta alone;"
                " expected default"
            )
    if content.get("quantization_config") is not None:
        yield (
            f"{where}: quantization_config is set: the actor trains weights in float32 or bfloat16;"
            " convert the checkpoint first"
        )


def tensor_names(hf: HfModelFacts) -> frozenset[str]:
    """Return the names of all tensors that the actor loads and exports, for a verified family."""
    family = FAMILIES[hf.model_type]
    content = load_json_object(hf.path / "config.json")
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not hf.tie_word_embeddings:
        names.add("lm_head.weight")
    every = [*family.layer, "input_layernorm.weight", "post_attention_layernorm.weight"]
    every += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    if family.always_qk_norm or content.get("use_qk_norm"):
        every += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    experts = [name.format(e=e) for e in range(hf.num_experts) for name in family.expert]
    sparse = [family.router, *family.moe_layer, *experts]
    dense = [f"mlp.{name}" for name in _MLP]
    for number in range(1, hf.num_hidden_layers + 1):
        mlp = sparse if number in hf.moe_layer_numbers else dense
        names.update(f"model.layers.{number - 1}.{name}" for name in (*every, *mlp))
    return frozenset(names)

"""Model families whose numbers were held against transformers; every other one is refused by name.

The bridge to Megatron knows more families than these, and builds some of them wrongly without a word.
A family is added here and in ``trainer/megatron/families/``, with a case in
tests/oracle/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from r3train.config.hf_facts import OF_TEXT_AND_IMAGES, HfModelFacts, load_model_config
from r3train.config.parallel import ParallelSection
from r3train.config.sources import raise_all

# model_type -> why Megatron's fused rotary embedding is not for it
UNFUSED_ROPE = {
    "gpt_oss": (
        "for packed sequences Megatron's fused kernel leaves out the factor of yarn by which this"
        " model's queries and keys grow, and every log-prob would be another"
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"),
        "Megatron's fused kernel for latent attention is experimental, and was not verified here",
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe"),
        "this model was verified with Megatron's own layers alone",
    ),
}
_ROPE = ("rope_parameters", "rope_scaling")
_MLP = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))
_QK_NORM = ("q_norm.weight", "k_norm.weight")
Config = Mapping[str, Any]  # the content of config.json


def _heads(*always: str) -> Callable[[Config, int], tuple[str, ...]]:
    """Names of an attention of heads, with ``always`` besides, and norms with ``use_qk_norm``."""

    def names(config: Config, layer_id: int) -> tuple[str, ...]:
        norms = _QK_NORM if config.get("use_qk_norm") else ()
        every = (*(f"{name}_proj.weight" for name in "qkvo"), *always, *norms)
        return tuple(f"self_attn.{name}" for name in every)

    return names


def _latent(config: Config, layer_id: int) -> tuple[str, ...]:
    """Names of multi-head latent attention; its queries are compressed with a ``q_lora_rank``."""
    queries = ("q_proj.weight",)
    if config.get("q_lora_rank") is not None:
        queries = ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight")
    keys = ("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight")
    return tuple(f"self_attn.{name}" for name in (*queries, *keys, "o_proj.weight"))


def _linear_layers(config: Config) -> list[bool]:
    """Layers of a hybrid model that have linear attention: all but every n-th."""
    interval = config.get("full_attention_interval") or 4
    return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]


def _hybrid(*inputs: str) -> Callable[[Config, int], tuple[str, ...]]:
    """Names of a gated delta net whose input projections are ``inputs``, or of an attention of heads."""

    def names(config: Config, layer_id: int) -> tuple[str, ...]:
        if not _linear_layers(config)[layer_id]:
            return _heads(*_QK_NORM)(config, layer_id)
        projections = (*(f"in_proj_{name}" for name in inputs), "out_proj", "conv1d", "norm")
        return (
            *(f"linear_attn.{name}.weight" for name in projections),
            *("linear_attn.A_log", "linear_attn.dt_bias"),
        )

    return names


def _nothing_else(config: Config) -> Iterator[str]:
    """Find no conflict."""
    yield from ()


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, as far as it was verified.

    ``needs``: key of config.json -> (its only verified value, the value that transformers takes where
    the key is missing).  ``conflicts`` yields complaints about several keys together.  ``rope_types``
    are those of scaled positions, ``read_as`` is transformers' model_type where it knows another,
    ``alone`` are sizes of the topology that must be 1, and ``whole_heads`` counts of heads in config.json
    that tensor ranks must divide, each with the reason; ``lora`` tells that adapters were verified too, and
    ``adapters_served`` that SGLang serves them right (of latent attention with compressed queries).
    ``log_prob_gap``: the largest difference, in nats, between SGLang's log-probs and the actor's in float32.
    The rest are names of tensors: what all but the output layer's begin with, those of a layer's
    attention, of the router, of one expert {e} or of all, and of a layer with experts beside these.
    """

    needs: Mapping[str, tuple[Any, Any]]
    prefix: str = "model"
    attention: Callable[[Config, int], tuple[str, ...]] = _heads()
    router: str = "mlp.gate.weight"
    expert: tuple[str, ...] = tuple(f"mlp.experts.{{e}}.{name}" for name in _MLP)
    moe_layer: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ()
    alone: Mapping[str, str] = field(default_factory=dict)
    whole_heads: Mapping[str, str] = field(default_factory=dict)
    conflicts: Callable[[Config], Iterator[str]] = _nothing_else
    read_as: str | None = None
    lora: bool = False
    adapters_served: bool = False
    log_prob_gap: float = 1e-4


_SILU = {"hidden_act": ("silu", "silu")}
_QWEN3 = _SILU | {"attention_bias": (False, False), "use_sliding_window": (False, False)}
_QKV_BIAS = tuple(f"{name}_proj.bias" for name in "qkv")
_FUSED_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_W123 = tuple(f"block_sparse_moe.experts.{{e}}.w{i}.weight" for i in (1, 2, 3))
_GATED_SHARED = (
    "mlp.shared_expert_gate.weight",
    *(f"mlp.shared_expert.{name}" for name in _MLP),
)
_SHARED = tuple(f"mlp.shared_experts.{name}" for name in _MLP)
_BIASED_AND_SHARED = ("mlp.gate.e_score_correction_bias", *_SHARED)


def _olmoe_conflicts(config: Config) -> Iterator[str]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups not in (None, heads):
        yield (
            f"num_key_value_heads is {groups}, expected {heads} (num_attention_heads): SGLang"
            " normalises the keys of olmoe as wide as its queries"
        )


def _minimax_conflicts(config: Config) -> Iterator[str]:
    """SGLang rotates ``rotary_dim`` numbers of a head, transformers a part of it."""
    rope, size = config.get("rope_parameters") or {}, config.get("head_dim")
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = config.get("rotary_dim", size)
    if part is not None and size is not None and rotated != int(size * part):
        yield (
            f"rotary_dim is {rotated}, expected {int(size * part)}: head_dim {size} times"
            f" partial_rotary_factor {part}"
        )


def _hybrid_conflicts(config: Config) -> Iterator[str]:
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
    if kinds is not None and [kind == "linear_attention" for kind in kinds] != _linear_layers(
        config
    ):
        yield (
            f"layer_types {kinds} is not what SGLang takes from full_attention_interval"
            f" {config.get('full_attention_interval')!r}"
        )


def _qwen3_5_conflicts(config: Config) -> Iterator[str]:
    yield from _hybrid_conflicts(config)
    gate = config.get("output_gate_type")
    if gate not in (None, "silu", "swish"):
        yield (
            f"output_gate_type is {gate!r}, expected 'silu' or 'swish': the actor and transformers"
            " gate the output of linear attention by no other function"
        )


def _gpt_oss_conflicts(config: Config) -> Iterator[str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        yield f"rope_type is {rope.get('rope_type')!r}, expected 'yarn' as in the published models"
    if not isinstance(config.get("sliding_window"), int):
        yield f"sliding_window is {config.get('sliding_window')!r}, expected a number of tokens"


def _deepseek_conflicts(config: Config) -> Iterator[str]:
    topk, groups = config.get("num_experts_per_tok"), config.get("topk_group")
    if (config.get("n_group") or 1) > 1 and topk != 2 * (groups or 1):
        yield (
            f"num_experts_per_tok is {topk} and topk_group {groups}, expected twice as many experts as"
            " groups: Megatron ranks a group by its best num_experts_per_tok // topk_group experts,"
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


_DEEPSEEK = Family(
    _SILU
    | {
        "norm_topk_prob": (True, True),
        "attention_bias": (False, False),
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
        "rope_interleave": (True, True),
    },
    attention=_latent,
    moe_layer=_BIASED_AND_SHARED,
    rope_types=("yarn",),
    conflicts=_deepseek_conflicts,
    lora=True,
    adapters_served=True,
)

_QWEN3_NEXT = Family(
    _SILU | {"attention_bias": (False, False), "mlp_only_layers": ([], [])},
    attention=_hybrid("qkvz", "ba"),
    moe_layer=_GATED_SHARED,
    alone={"context_parallel_size": "its linear attention is not cut over ranks"},
    whole_heads={
        "num_key_value_heads": "the gate of its attention is cut between key heads",
        "linear_num_key_heads": "its linear attention is cut between heads",
    },
    conflicts=_hybrid_conflicts,
)

FAMILIES: dict[str, Family] = {
    "qwen3": Family(_QWEN3, attention=_heads(*_QK_NORM), lora=True),
    "qwen3_moe": Family(_QWEN3, attention=_heads(*_QK_NORM), lora=True, adapters_served=True),
    "qwen2_moe": Family(
        _SILU | {"use_sliding_window": (False, False), "qkv_bias": (True, True)},
        attention=_heads(*_QKV_BIAS),
        moe_layer=_GATED_SHARED,
        lora=True,
    ),
    "mixtral": Family(
        _SILU | {"sliding_window": (None, None), "router_jitter_noise": (0.0, 0.0)},
        router="block_sparse_moe.gate.weight",
        expert=_W123,
        lora=True,
        adapters_served=True,
    ),
    "minimax_m2": Family(
        _SILU
        | {
            # what SGLang takes for a key that is missing is another model
            "scoring_func": ("sigmoid", None),
            "use_routing_bias": (True, None),
            "use_qk_norm": (True, None),
            "qk_norm_type": ("per_layer", "per_layer"),
            "router_jitter_noise": (0.0, 0.0),
        },
        attention=_heads(),
        router="block_sparse_moe.gate.weight",
        expert=_W123,
        moe_layer=("block_sparse_moe.e_score_correction_bias",),
        whole_heads={"num_key_value_heads": "the norm over all its keys is cut between heads"},
        conflicts=_minimax_conflicts,
        lora=True,
        adapters_served=True,
    ),
    "olmoe": Family(
        _SILU
        | {
            "attention_bias": (False, False),
            "clip_qkv": (None, None),
            # fixed in SGLang
            "norm_topk_prob": (False, False),
            "rms_norm_eps": (1e-5, 1e-5),
        },
        attention=_heads(*_QK_NORM),
        conflicts=_olmoe_conflicts,
        lora=True,
        adapters_served=True,
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
        attention=_heads(*_QKV_BIAS),
        moe_layer=_BIASED_AND_SHARED,
        lora=True,
        adapters_served=True,
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe": replace(
        _QWEN3_NEXT,
        needs=_QWEN3_NEXT.needs
        | {
            "norm_topk_prob": (True, True),
            "attn_output_gate": (True, True),
            "tie_word_embeddings": (False, False),
        },
        prefix="model.language_model",
        attention=_hybrid("qkv", "z", "b", "a"),
        expert=_FUSED_EXPERTS,
        conflicts=_qwen3_5_conflicts,
    ),
    "gpt_oss": Family(
        {
            "hidden_act": ("silu", "silu"),
            "attention_bias": (True, True),
            "swiglu_alpha": (1.702, 1.702),
        },
        attention=_heads(*_QKV_BIAS, "o_proj.bias", "sinks"),
        router="mlp.router.weight",
        expert=(*_FUSED_EXPERTS, *(f"{name}_bias" for name in _FUSED_EXPERTS)),
        moe_layer=("mlp.router.bias",),
        rope_types=("yarn",),
        alone={"expert_tensor_parallel_size": "its experts have biases"},
        log_prob_gap=1e-3,  # SGLang keeps its sinks in bfloat16
        lora=True,
        conflicts=_gpt_oss_conflicts,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        needs=_SILU
        | {
            "norm_topk_prob": (False, False),
            "attention_bias": (False, False),
            "scoring_func": ("softmax", "softmax"),
            "topk_method": ("greedy", "greedy"),
            "n_group": (1, 1),
            "routed_scaling_factor": (1.0, 1.0),
        },
        moe_layer=_SHARED,
        adapters_served=False,
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": replace(_DEEPSEEK, read_as="deepseek_v3"),
    "glm4_moe_lite": _DEEPSEEK,
}
_MTP_COUNTS = (
    *("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
    "mtp_num_hidden_layers",
)
# families with a reason of their own
REFUSED = {
    "deepseek_v32": "its sparse attention runs on CUDA alone, in SGLang and in Megatron, and nobody"
    " compared the two",
}
# SGLang loads these two of a layer as one tensor, forgets one that comes alone, and answers success
_LOADED_AS_ONE = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")


def check_family(hf: HfModelFacts) -> None:
    """Raise ConfigError with every reason why the checkpoint's model was not verified."""
    raise_all(family_conflicts(hf))


def family_conflicts(hf: HfModelFacts) -> Iterator[str]:
    """Yield a complaint for a family that nobody verified, and for each key that makes it another."""
    content = load_model_config(hf.path)
    family = FAMILIES.get(hf.model_type)
    where = f"{hf.path}/config.json"
    if hf.model_type in REFUSED:
        yield f"{where}: model_type {hf.model_type!r} is refused: {REFUSED[hf.model_type]}"
        return
    if family is None:
        yield (
            f"{where}: model_type {hf.model_type!r} was not verified against transformers, and would"
            f" be trained wrongly without a word; verified: {', '.join(sorted(FAMILIES))}"
            " (docs/extending.md tells how to add a family)"
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
        if kind not in (None, "default", *family.rope_types):
            expected = " or ".join(("default", *family.rope_types))
            yield (
                f"{where}: {key} has rope_type {kind!r}, by which the actor of {hf.model_type} does"
                f" not rotate; expected {expected}"
            )
    for complaint in family.conflicts(content):
        yield f"{where}: {complaint}"
    quantised = content.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield (
            f"{where}: quantization_config is set ({method}): the actor trains weights in float32 or"
            " bfloat16; convert the checkpoint first (docs/models.md tells how)"
        )


def untrained_parts(hf: HfModelFacts) -> str | None:
    """Return words for the layers that SGLang and the actor leave out; None without such."""
    content = load_model_config(hf.path)
    count = next(filter(None, map(content.get, _MTP_COUNTS)), None)
    if not isinstance(count, int) or not count:
        return None
    return f"{count} layer(s) of multi-token prediction are neither served nor trained nor exported"


def topology_conflicts(hf: HfModelFacts, parallel: ParallelSection) -> Iterator[str]:
    """Yield a complaint for each size of the topology in which the family was not verified."""
    family = FAMILIES.get(hf.model_type)
    if family is None:
        return
    for name, reason in family.alone.items():
        size = getattr(parallel, name)
        if size not in (None, 1):
            flag = name.replace("_", "-")
            yield f"--{flag} {size}: {hf.model_type} needs 1: {reason}"
    if not family.whole_heads:
        return
    tp, content = parallel.tensor_model_parallel_size, load_model_config(hf.path)
    for key, reason in family.whole_heads.items():
        heads = content.get(key)
        if isinstance(heads, int) and heads % tp:
            yield (
                f"--tensor-model-parallel-size {tp} does not divide {key} {heads} of {hf.model_type}:"
                f" {reason}"
            )


def model_type_of(hf_checkpoint: Path) -> str:
    """Return the model_type in a directory's config.json; "" without one."""
    if not (hf_checkpoint / "config.json").is_file():
        return ""
    return load_model_config(hf_checkpoint).get("model_type", "")


def has_fused_experts(hf_checkpoint: Path) -> bool:
    """Return True where all experts of a layer are one tensor on disk, and SGLang loads it so."""
    family = FAMILIES.get(model_type_of(hf_checkpoint))
    return family is not None and not any("{e}" in name for name in family.expert)


def sent_together(hf: HfModelFacts) -> tuple[tuple[str, str], ...]:
    """Return pairs of tensors that one call of a weight update must bring."""
    names = tensor_names(hf)
    pairs = (
        tuple(f"model.layers.{layer_id}.self_attn.{name}" for name in _LOADED_AS_ONE)
        for layer_id in range(hf.num_hidden_layers)
    )
    return tuple(pair for pair in pairs if names >= set(pair))


def tensor_names(hf: HfModelFacts) -> Set[str]:
    """Return the names of all tensors that the actor loads and exports, in order, for a verified family."""
    family = FAMILIES[hf.model_type]
    content = load_model_config(hf.path)
    names = [f"{family.prefix}.embed_tokens.weight", f"{family.prefix}.norm.weight"]
    if not hf.tie_word_embeddings:
        names.append("lm_head.weight")
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    experts = [name.format(e=e) for e in range(hf.num_experts) for name in family.expert]
    sparse = [family.router, *family.moe_layer, *experts]
    dense = [f"mlp.{name}" for name in _MLP]
    for number in range(1, hf.num_hidden_layers + 1):
        mlp = sparse if number in hf.moe_layer_numbers else dense
        attention = family.attention(content, number - 1)
        layer = f"{family.prefix}.layers.{number - 1}"
        names.extend(f"{layer}.{name}" for name in (*norms, *attention, *mlp))
    return dict.fromkeys(names).keys()

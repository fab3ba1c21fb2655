"""The record of a model family, and the sizes and traits of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from r3train.families.hf_facts import HfModelFacts
from r3train.families.tiny_options import TinyModel
from r3train.families.transformer import (
    DEFAULTS,
    Fields,
    Keys,
    no_fields,
    common_fields,
    whole_heads_rotate,
)
from r3train.families.weights import ModelWeights, Sizes, Table

Config = Mapping[str, Any]  # the content of config.json

# values of ``Family.needs`` that several families share
SILU = {"hidden_act": ("silu", "silu")}


def _no_conflict(config: Config) -> Iterator[str]:
    """Find no conflict."""
    yield from ()


Layers = Literal[
    "",
    "biased_experts",
    "gated_delta_net",
    "latent_attention",
    "mamba",
    "softmax_expert_bias",
    "sparse_latent_attention",
    "whole_width_norm",
]


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, as far as it was verified."""

    weights: Table
    """Its parameters in Megatron and its tensors on disk."""
    transformer: Callable[[Keys], Fields]
    """TransformerConfig's fields beyond those of every family; of latent attention MLATransformerConfig's."""
    needs: Mapping[str, tuple[Any, Any]]
    """Key of config.json -> (its only verified value, the value that transformers takes for a missing key)."""
    tiny: Mapping[str, TinyModel]
    """Its tiny models by name: the tests and ``r3train make-tiny-model`` take them."""
    rope_types: tuple[str, ...] = ()
    """Kinds of scaled positions that were verified next to plain ones."""
    alone: Mapping[str, str] = field(default_factory=dict)
    """Sizes of the topology that must be 1, each with the reason."""
    whole_heads: Mapping[str, str] = field(default_factory=dict)
    """Counts of heads in config.json that tensor ranks must divide, each with the reason."""
    heads_of_contexts: tuple[str, ...] = ()
    """Those of them that context-parallel ranks divide too."""
    conflicts: Callable[[Config], Iterator[str]] = _no_conflict
    """Yields complaints about several keys together."""
    refused_overrides: Mapping[str, str] = field(default_factory=dict)
    """Settings of TransformerConfig that cannot be on, each with the reason."""
    attribute_map: Mapping[str, str] = field(default_factory=dict)
    """Keys that other families have -> its own names of them; transformers' configurations have such a map too."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that config.json may leave out -> what transformers takes then."""
    rotary: Callable[[Keys], Fields] = whole_heads_rotate
    """GPTModel's arguments for positions."""
    attributes: Callable[[Keys], Fields] = no_fields
    """What GPTModel reads of a TransformerConfig that is no field of it."""
    layers: Layers = ""
    """What the trainer changes in Megatron's layers (trainer/megatron/layers)."""
    read_as: str | None = None
    """model_type under which transformers loads it, if different."""
    lora: bool = False
    """Adapters were verified too."""
    adapters_served: bool = False
    """SGLang serves adapters right; of latent attention those with compressed queries."""
    fp8_served: bool = False
    """SGLang serves it right with its linears in blocks of fp8."""
    peft_fuses_experts: bool = False
    """PEFT on transformers' model adapts all experts of a layer as one."""
    unread_by_peft: Mapping[str, str] = field(default_factory=dict)
    """Linears whose adapters PEFT does not put on transformers' model, each with the reason."""
    serves_tied: bool = False
    """SGLang generates from the embedding where it is the output layer; of models with experts."""
    served_sparse: bool = False
    """SGLang builds every layer with experts."""
    cpu_attention: str = ""
    """SGLang's attention backend on a CPU, where the one of its own choice does not serve the family."""
    activation_steps: int = 0
    """Steps of an expert's gated activation that each keep a result, where no kernel fuses them."""
    served_in_less: bool = False
    """SGLang keeps a tensor in fewer bits than an actor in float32 does."""
    log_prob_gap: float = 1e-4
    """The largest difference, in nats, between SGLang's log-probs and the actor's in float32."""

    @property
    def has_experts(self) -> bool:
        """False for a dense model."""
        return any(weight.is_expert for weight in self.weights.layer_weights)

    @property
    def is_multimodal(self) -> bool:
        """True for the language model of a model of text and images: its keys are in text_config."""
        return "." in self.weights.prefix


def linear_layers(config: Config) -> list[bool]:
    """Layers of a hybrid model that have linear attention: all but every n-th."""
    interval = config.get("full_attention_interval") or 4
    return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]


def indexer_layers(keys: Keys) -> list[bool]:
    """Layers with an indexer of their own; each other one attends to the tokens of the layer before it.

    Source: transformers 5.19, ``GlmMoeDsaConfig``.
    """
    if "indexer_types" in keys:
        return keys.layer_flags("indexer_types", {"full": True, "shared": False})
    if "index_topk_pattern" in keys:
        return keys.layer_flags("index_topk_pattern", {"F": True, "S": False})
    layers = range(keys["num_hidden_layers"])
    if "index_topk_freq" not in keys:
        return [True for _ in layers]
    every, offset = keys.integer("index_topk_freq"), "index_skip_topk_offset"
    first = keys.integer(offset) if offset in keys else 2
    return [max(i - first + 1, 0) % every == 0 for i in layers]


def keys_of(family: Family, hf: HfModelFacts) -> Keys:
    """Return the keys of a checkpoint's config.json."""
    content = hf.content
    defaults = DEFAULTS | family.defaults
    return Keys(f"{hf.path}/config.json", content, defaults, family.attribute_map)


def transformer_fields(family: Family, hf: HfModelFacts) -> Fields:
    """Return the fields of TransformerConfig; raises ValueError naming a key that config.json lacks."""
    keys = keys_of(family, hf)
    return common_fields(keys) | family.transformer(keys)


def model_arguments(family: Family, hf: HfModelFacts) -> Fields:
    """Return GPTModel's arguments that follow from config.json."""
    sizes = {"vocab_size": hf.vocab_size, "max_sequence_length": hf.max_position_embeddings}
    return sizes | family.rotary(keys_of(family, hf))


def model_weights(family: Family, hf: HfModelFacts) -> ModelWeights:
    """Return a family's table with the sizes of a checkpoint's config.json."""
    table, config = family.weights, keys_of(family, hf)
    traits = _traits(hf, config)
    return ModelWeights(table, _sizes(table, hf, config), traits, hf.tie_word_embeddings)


class _Sizes(dict[str, int]):
    """The sizes of a table; raises ValueError naming the key of config.json that one lacks."""

    def __init__(self, keys: Keys, key_of: Mapping[str, str], **known: int):
        super().__init__(known)
        self._keys, self._key_of = keys, key_of

    def __missing__(self, size: str) -> int:
        self[size] = self._keys.integer(self._key_of.get(size, size))
        return self[size]


# size of a table -> the key of config.json that holds it; any other size is a key itself
_KEY_OF = {
    "mlp": "intermediate_size",
    "shared": "n_shared_experts",
    "shared_expert": "shared_expert_intermediate_size",
    "q_rank": "q_lora_rank",
    "latent": "kv_lora_rank",
    "rope": "qk_rope_head_dim",
    "nope": "qk_nope_head_dim",
    "value": "v_head_dim",
    "linear_keys": "linear_num_key_heads",
    "linear_key": "linear_key_head_dim",
    "linear_heads": "linear_num_value_heads",
    "linear_value": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
    "mamba_heads": "mamba_num_heads",
    "mamba_head": "mamba_head_dim",
    "mamba_groups": "n_groups",
    "mamba_state": "ssm_state_size",
    "mamba_kernel": "conv_kernel",
    "wide_shared_expert": "moe_shared_expert_intermediate_size",
    "index_heads": "index_n_heads",
    "index_head": "index_head_dim",
}


def _sizes(table: Table, hf: HfModelFacts, keys: Keys) -> Sizes:
    return _Sizes(
        keys,
        _KEY_OF | {"expert": table.expert_width},
        hidden=hf.hidden_size,
        vocab=hf.vocab_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head=keys.head_dim,
        experts=hf.num_experts,
    )


# letters of hybrid_override_pattern, of layers with one mixer each
_MIXERS = {"M": "mamba", "*": "full", "E": "sparse", "-": "dense"}


def _traits(hf: HfModelFacts, config: Keys) -> tuple[frozenset[str], ...]:
    """Return the traits of each layer, see ``weight_rows``."""
    if mixers := config.get("hybrid_override_pattern"):
        return tuple(frozenset({_MIXERS[letter]}) for letter in mixers)
    compressed = config.get("q_lora_rank") is not None
    common = {"q_rank" if compressed else "no_q_rank"}
    if config.get("use_qk_norm"):
        common.add("qk_norm")
    kinds = zip(linear_layers(config), indexer_layers(config))
    return tuple(
        frozenset(
            common
            | {"sparse" if number in hf.moe_layer_numbers else "dense"}
            | {"linear" if is_linear else "full"}
            | ({"indexer"} if has_indexer else set())
        )
        for number, (is_linear, has_indexer) in enumerate(kinds, start=1)
    )

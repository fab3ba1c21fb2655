"""The record of a model family, and the sizes and traits of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from r3train.config.hf_facts import HfModelFacts, load_model_config
from r3train.families.weights import ModelWeights, Sizes, Table

Config = Mapping[str, Any]  # the content of config.json
ROPE_KEYS = ("rope_parameters", "rope_scaling")

# values of ``Family.needs`` that several families share
SILU = {"hidden_act": ("silu", "silu")}


def _no_conflict(config: Config) -> Iterator[str]:
    """Find no conflict."""
    yield from ()


@dataclass(frozen=True)
class Family:
    """A family of checkpoints, as far as it was verified.

    ``weights``: its table.  ``needs``: key of config.json -> (its only verified value, the value that transformers
    takes where the key is missing).  ``conflicts`` yields complaints about several keys together.  ``rope_types``
    are those of scaled positions, ``read_as`` is transformers' model_type where it knows another,
    ``alone`` are sizes of the topology that must be 1, and ``whole_heads`` counts of heads in config.json
    that tensor ranks must divide, each with the reason.  ``unfused_rope``: why Megatron's fused rotary embedding
    is not for it.  ``lora``: adapters were verified too, and ``adapters_served``: SGLang serves them right (of
    latent attention with compressed queries).
    ``log_prob_gap``: the largest difference, in nats, between SGLang's log-probs and the actor's in float32.
    """

    weights: Table
    needs: Mapping[str, tuple[Any, Any]]
    rope_types: tuple[str, ...] = ()
    alone: Mapping[str, str] = field(default_factory=dict)
    whole_heads: Mapping[str, str] = field(default_factory=dict)
    conflicts: Callable[[Config], Iterator[str]] = _no_conflict
    unfused_rope: str = ""
    read_as: str | None = None
    lora: bool = False
    adapters_served: bool = False
    log_prob_gap: float = 1e-4


def linear_layers(config: Config) -> list[bool]:
    """Layers of a hybrid model that have linear attention: all but every n-th."""
    interval = config.get("full_attention_interval") or 4
    return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]


def model_weights(table: Table, hf: HfModelFacts) -> ModelWeights:
    """Return a table with the sizes of a checkpoint's config.json."""
    config = load_model_config(hf.path)
    traits = _traits(hf, config)
    return ModelWeights(table, _sizes(table, hf, config), traits, hf.tie_word_embeddings)


def _sizes(table: Table, hf: HfModelFacts, config: Config) -> Sizes:
    """Map each name of a size to its number; None where config.json does not say it."""

    def given(key: str) -> int | None:
        value = config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    head = given("head_dim")
    if head is None and table.heads_share_hidden:
        head = hf.hidden_size // hf.num_attention_heads
    return {
        "hidden": hf.hidden_size,
        "vocab": hf.vocab_size,
        "heads": hf.num_attention_heads,
        "kv_heads": hf.num_key_value_heads,
        "head": head,
        "mlp": given("intermediate_size"),
        "experts": hf.num_experts,
        "expert": given(table.expert_width),
        "shared": given("n_shared_experts"),
        "shared_expert": given("shared_expert_intermediate_size"),
        "q_rank": given("q_lora_rank"),
        "latent": given("kv_lora_rank"),
        "rope": given("qk_rope_head_dim"),
        "nope": given("qk_nope_head_dim"),
        "value": given("v_head_dim"),
        "linear_keys": given("linear_num_key_heads"),
        "linear_key": given("linear_key_head_dim"),
        "linear_heads": given("linear_num_value_heads"),
        "linear_value": given("linear_value_head_dim"),
        "kernel": given("linear_conv_kernel_dim"),
    }


def _traits(hf: HfModelFacts, config: Config) -> tuple[frozenset[str], ...]:
    """Return the traits of each layer, see ``rows``."""
    compressed = config.get("q_lora_rank") is not None
    of_all = {"q_rank" if compressed else "no_q_rank"}
    if config.get("use_qk_norm"):
        of_all.add("qk_norm")
    return tuple(
        frozenset(
            of_all
            | {"sparse" if number in hf.moe_layer_numbers else "dense"}
            | {"linear" if is_linear else "full"}
        )
        for number, is_linear in enumerate(linear_layers(config), start=1)
    )

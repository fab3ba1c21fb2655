"""Megatron's configuration of a family's model, from config.json only.

These are fields of TransformerConfig, without those of a run (parallel sizes, dtypes), and what GPTModel asks for
besides.  An activation is named by a word: this room imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3train.families.hf_facts import EXPERT_KEYS

Fields = dict[str, Any]
# of rotary positions: transformers 5's key, and that of older releases
ROPE_KEYS = ("rope_parameters", "rope_scaling")
# keys that releases leave out -> what transformers takes for them; a family may have others
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


class Keys(dict[str, Any]):
    """The keys of a JSON object of config.json that are not null, and ``defaults`` of those that may be missing.

    Raises ValueError for a key that is in neither.  file: the file's path, and the object's name in it.
    names: the file's own names of keys, where it has others (``Family.attribute_map``).
    """

    def __init__(
        self,
        file: str,
        content: Mapping[str, Any],
        defaults: Mapping[str, Any],
        names: Mapping[str, str],
    ):
        super().__init__(defaults)
        self.file, self._names = file, names
        self._null = {key for key, value in content.items() if value is None}
        self.update((key, value) for key, value in content.items() if value is not None)

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.file}: key {self._names.get(key, key)} is missing")

    def integer(self, key: str) -> int:
        """Return a key that must be a number of at least 1."""
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{self.file}: key {self._names.get(key, key)} must be an integer of at least 1,"
                f" got {value!r}"
            )
        return value

    def integer_or_null(self, key: str, null: int) -> int:
        """Return a number that may be null, and then is ``null``."""
        return null if key in self._null else self.integer(key)

    def layer_flags(self, key: str, words: Mapping[str, bool]) -> list[bool]:
        """Return a key that must hold one of the words for each layer."""
        value, layers = self[key], self["num_hidden_layers"]
        is_list = isinstance(value, (list, str)) and len(value) == layers
        if not is_list or not all(isinstance(word, str) and word in words for word in value):
            raise ValueError(
                f"{self.file}: key {key} must hold {layers} of {', '.join(words)}, one per layer, got {value!r}"
            )
        return [words[word] for word in value]

    @property
    def head_dim(self) -> int:
        """Numbers of a head: where no key has them, heads share the hidden size."""
        if "head_dim" in self:
            return self.integer("head_dim")
        return self.integer("hidden_size") // self.integer("num_attention_heads")

    @property
    def rope(self) -> Keys:
        """Rotary positions as transformers 5 saves them; releases have rope_scaling, and rope_theta next to it."""
        name = next((name for name in ROPE_KEYS if self.get(name)), ROPE_KEYS[0])
        content = self.get(name, {})
        if not isinstance(content, Mapping):
            raise ValueError(f"{self.file}: key {name} must hold a JSON object, got {content!r}")
        defaults = {"rope_type": content.get("type", "default"), "rope_theta": self["rope_theta"]}
        return Keys(f"{self.file}: {name}", content, defaults, {})

    @property
    def num_experts(self) -> int:
        """The number of experts: transformers 5 saves Qwen's under Mixtral's key."""
        return self[next(filter(self.get, EXPERT_KEYS), EXPERT_KEYS[0])]


# fused steps of Transformer Engine's layers
FUSED = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
FUSED_AND_PERSISTENT = FUSED | {"persist_layer_norm": True}


def common_fields(keys: Keys) -> Fields:
    """Return the fields that all families have."""
    heads = keys["num_attention_heads"]
    return {
        "activation_func": "silu",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "masked_softmax_fusion": True,
        "num_layers": keys["num_hidden_layers"],
        "hidden_size": keys["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": keys.get("num_key_value_heads", heads),
        "kv_channels": keys.head_dim,
        # a model without dense layers has no width of theirs
        "ffn_hidden_size": keys.get("intermediate_size", keys.get("moe_intermediate_size")),
        "layernorm_epsilon": keys["rms_norm_eps"],
    }


def experts(keys: Keys, width: str = "moe_intermediate_size", **more: Any) -> Fields:
    """Return the fields of layers with experts; width: the key of an expert's.

    Gates are a softmax over the chosen experts, unless ``more`` says otherwise, and no bias moves.
    """
    return {
        "num_moe_experts": keys.num_experts,
        "moe_router_topk": keys["num_experts_per_tok"],
        "moe_ffn_hidden_size": keys[width],
        "moe_grouped_gemm": True,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_bias_update_rate": 0.0,
    } | more


def gated_shared_expert(keys: Keys) -> Fields:
    """Return the fields of a shared expert with a gate."""
    return {
        "moe_shared_expert_intermediate_size": keys["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_shared_expert_overlap": False,  # nobody verified a gate with it
    }


def sigmoid_and_shared(keys: Keys, num_shared: int) -> Fields:
    """Return the fields of experts chosen by sigmoids and biases, next to experts that every token has."""
    return experts(
        keys,
        moe_router_pre_softmax=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=keys["routed_scaling_factor"],
        moe_shared_expert_intermediate_size=num_shared * keys.integer("moe_intermediate_size"),
        moe_shared_expert_overlap=True,
    )


def no_fields(keys: Keys) -> Fields:
    """Set nothing."""
    return {}


def whole_heads_rotate(keys: Keys) -> Fields:
    """Return GPTModel's arguments for rotary positions."""
    return {"position_embedding_type": "rope", "rotary_base": keys.rope["rope_theta"]}


def part_of_heads_rotates(keys: Keys) -> Fields:
    """Return GPTModel's arguments where a part of every head is rotated."""
    return whole_heads_rotate(keys) | {"rotary_percent": _rotary_part(keys)}


def _rotary_part(keys: Keys) -> float:
    part = keys.rope.get("partial_rotary_factor", keys.get("partial_rotary_factor"))
    if part is None and "rotary_dim" in keys:
        part = keys.integer("rotary_dim") / keys.head_dim
    return 1.0 if part is None else part

"""Facts of a Hugging Face checkpoint; ``read_facts`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3train.types import RouteShape

# the number of experts, as Qwen, DeepSeek and GLM, and Mixtral call it
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class HfModelFacts:
    """The shape of a checkpoint's model, as its config.json states it.

    ``moe_layer_numbers``: 1-based numbers of the layers with experts.  A dense model has none, and
    its ``num_experts`` and ``num_experts_per_tok`` are 0.  ``index_topk``: tokens that each token attends to, where
    an indexer chooses them; None with attention to all.  ``content``: config.json, its language model's keys on top.
    """

    path: Path
    model_type: str
    num_hidden_layers: int
    num_experts: int
    num_experts_per_tok: int
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    moe_layer_numbers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    index_topk: int | None = None
    content: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layer_numbers)

    @property
    def route_shape(self) -> RouteShape:
        """The shape of one token's routes.  It counts all decoder layers, dense ones too."""
        layers = range(self.num_hidden_layers)
        dense = tuple(i for i in layers if i + 1 not in self.moe_layer_numbers)
        return RouteShape(self.num_hidden_layers, self.num_experts_per_tok, self.num_experts, dense)

"""Latent attention over the tokens that an indexer chooses (DeepSeek sparse attention), on packed sequences."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from r3train.families.weights import ModelWeights
from r3train.patches import overrides
from r3train.trainer.megatron.layers.latent_attention import adapt_latent_attention


@dataclass
class SparseAttentionParts(dsa.DSAttentionSubmodules):
    """Its indexer, and the attention for microbatches in which the indexer would choose every token."""

    dense: Any = None


class WholeLinear(Linear):
    """A linear that every tensor rank has: in a checkpoint they are replicas of one."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()


class KeyNorm(torch.nn.LayerNorm):
    """The norm of the indexer's keys."""

    def __init__(self, config: Any, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class SparseAttention(dsa.DSAttention):
    """Megatron's sparse attention; of microbatches without a long sequence the model's dense one.

    A sequence of at most ``dsa_indexer_topk`` tokens has all of them chosen, so dense attention computes the same.
    The indexer is not trained: no gradient of the policy loss reaches it.
    """

    def __init__(self, config: Any, submodules: SparseAttentionParts, **named: Any):
        # Megatron knows no other way for sparse attention, and asserts it
        super().__init__(config, submodules, **named | {"cp_comm_type": "all_gather"})
        self.dense = build_module(submodules.dense, config=config, **named)
        self.indexer.requires_grad_(False)

    @property
    def hidden_size_per_attention_head_v(self) -> int:
        """The size of a value's head in Transformer Engine's attention, which Megatron sets for padded values."""
        return self.dense.hidden_size_per_attention_head_v

    @hidden_size_per_attention_head_v.setter
    def hidden_size_per_attention_head_v(self, size: int) -> None:
        self.dense.hidden_size_per_attention_head_v = size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        x: torch.Tensor,
        qr: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        attn_mask_type: Any = None,
    ) -> torch.Tensor:
        """Attend.  query, key, value: [n, heads, size] of this rank; returns [n, heads * size].

        x: hidden states [n, 1, hidden], qr: compressed queries [n, rank], of which the indexer makes its choice;
        both may be sequence-parallel shares.
        """
        assert packed_seq_params is not None, "the actor always packs"
        given = dict(attn_mask_type=attn_mask_type, packed_seq_params=packed_seq_params)
        if packed_seq_params.max_seqlen_q <= self.index_topk:
            return self.dense(query, key, value, attention_mask, **given)
        return super().forward(query, key, value, attention_mask, x, qr, **given).flatten(1)


overrides(
    dsa.DSAttention,
    "forward",
    expects="(self, query, key, value, attention_mask, x, qr, position_ids=None, attn_mask_type=None,"
    " attention_bias=None, packed_seq_params=None, up_v_weight=None)",
    why="dense attention is faster where all tokens are chosen",
)


def adapt_sparse_attention(
    layers: Any, weights: ModelWeights, first_layer: int, use_te: bool
) -> None:
    """Give latent attention an indexer, and take its norm of queries out of their projection."""
    adapt_latent_attention(layers, weights, first_layer, use_te)
    indexer = dsa.DSAIndexerSubmodules(
        linear_wq_b=WholeLinear,
        linear_wk=WholeLinear,
        k_norm=KeyNorm,
        linear_weights_proj=WholeLinear,
    )
    for i, spec in enumerate(layers.layer_specs):
        # layers share one specification
        layer = layers.layer_specs[i] = copy.deepcopy(spec)
        parts = layer.submodules.self_attention.submodules
        parts.core_attention = ModuleSpec(
            module=SparseAttention,
            submodules=SparseAttentionParts(
                indexer=ModuleSpec(module=dsa.DSAIndexer, submodules=indexer),
                dense=parts.core_attention,
            ),
        )
        if use_te:
            from megatron.core.extensions import transformer_engine as te

            parts.q_layernorm = te.TENorm
            parts.linear_q_up_proj = te.TEColumnParallelLinear

"""Latent attention over the tokens that an indexer chooses (DeepSeek sparse attention), on packed sequences."""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from r3train.families.weights import ModelWeights
from r3train.patches import overrides, patch
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


class IndexerCall(Protocol):
    """The replay of a layer's choice of tokens in one call."""

    def replaced(self, live: torch.Tensor) -> torch.Tensor:
        """Return the tokens that the rows attend to, given the indexer's choice.

        Both are int64[n, K]: positions in the row's sequence, and -1 after the last.  Rows are those of
        ``RankSlice.tokens``.
        """
        ...

    def used(self, tokens: torch.Tensor) -> None:
        """Take note of the tokens that attention is given, as in ``replaced``."""
        ...

    def all_chosen(self) -> None:
        """Take note that every row attends to all tokens: no sequence is longer than K."""
        ...


class ChoiceReplay(Protocol):
    """The replay of indexers' choices, as ``RouterReplay`` is of a router's experts."""

    def begin_call(self, layer_number: int, x: torch.Tensor) -> IndexerCall | None:
        """Return the replay of the layer's call that begins, None outside a pass.

        x: the layer's input.  Later in the call Megatron computes without gradients, and no call looks like a recomputation:
        this method must ask for the microbatch.
        """
        ...


class SparseAttention(dsa.DSAttention):
    """Megatron's sparse attention; of microbatches without a long sequence the model's dense one.

    A sequence of at most ``dsa_indexer_topk`` tokens has all of them chosen, so dense attention computes the same.
    The indexer is not trained: no gradient of the policy loss reaches it.  ``choice_replay``, where it is set, replaces
    its choice.
    """

    choice_replay: ChoiceReplay | None = None

    def __init__(self, config: Any, submodules: SparseAttentionParts, **named: Any):
        # Megatron knows no other way for sparse attention, and asserts it
        super().__init__(config, submodules, **named | {"cp_comm_type": "all_gather"})
        self.dense = build_module(submodules.dense, config=config, **named)
        if self.indexer is not None:
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
        attention_bias: None = None,
    ) -> torch.Tensor:
        """Attend.  query, key, value: [n, heads, size] of this rank; returns [n, heads * size].

        x: hidden states [n, 1, hidden], qr: compressed queries [n, rank], of which the indexer makes its choice;
        both may be sequence-parallel shares.  attention_bias: of no model; a recomputation names it.
        """
        assert packed_seq_params is not None, "the actor always packs"
        given = dict(attn_mask_type=attn_mask_type, packed_seq_params=packed_seq_params)
        replay = self.choice_replay
        call = None if replay is None else replay.begin_call(self.layer_number, x)
        if packed_seq_params.max_seqlen_q <= self.index_topk:
            if call is not None:
                call.all_chosen()
            return self.dense(query, key, value, attention_mask, **given)
        kept = packed_seq_params.__dict__.setdefault("live_choices", {})  # by the indexer's layer
        if self.skip_topk:
            places = self._places(call, *kept[self.source_layer])
            self._get_index_share_topk_holder(packed_seq_params)[self.source_layer] = places
        token = _call.set((self, call, kept))
        try:
            out = super().forward(query, key, value, attention_mask, x, qr, **given)
        finally:
            _call.reset(token)
        if self.index_share:
            # Megatron's copy, of 8 bytes a token; the next layer makes its own
            self._get_index_share_topk_holder(packed_seq_params).clear()
            if not self._is_read_again:
                del kept[self.source_layer]
        return out.flatten(1)

    @property
    def _is_read_again(self) -> bool:
        """True if another layer, or this one's recomputation in the backward pass, reads its indexer's choice."""
        behind = self.layer_number + 1, self.index_skip_topk_offset, self.index_topk_freq
        is_recomputed = self.training and self.config.recompute_granularity is not None
        return is_recomputed or dsa.is_dsa_skip_topk_layer(*behind)

    def _places(
        self, call: IndexerCall | None, live: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Return the places in the pack that rows attend to, int64[1, n, K]: the replay's, else the live choice's.

        live: int[n, K], positions in the row's sequence, -1 after the last.  starts: int[n, 1], of the sequences.
        """
        chosen = live.long() if call is None else call.replaced(live.long())
        places = torch.where(chosen < 0, -1, chosen + starts)
        if call is not None:
            call.used(torch.where(places < 0, -1, places - starts))
        return places[None]


# the layer whose call is in progress, its replay, and the choices of its microbatch that are kept
_call: ContextVar[tuple[SparseAttention, IndexerCall | None, dict[int, Any]]] = ContextVar("call")
_megatrons_choice = dsa.fused_qk_topk_naive


def _choose(
    q, k, weights, index_topk, **named
):  # noqa: ANN001, ANN003, ANN202 - Megatron's signature
    """Let the layer's replay replace the choice, int64[1, n, K] of places in the whole pack."""
    scores, places = _megatrons_choice(q, k, weights, index_topk, **named)
    attention, call, kept = _call.get()
    starts = named["varlen_starts"].view(-1, 1)
    live = torch.where(places[0] < 0, -1, places[0] - starts)
    if attention.index_share:
        kept[attention.layer_number] = live.int(), starts
    return scores, attention._places(call, live, starts)


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
    patch(
        dsa,
        "fused_qk_topk_naive",
        _choose,
        expects="(q, k, weights, index_topk, mask=None, varlen_starts=None, varlen_ends=None,"
        " key_positions=None, use_relu=True)",
        why="a choice of tokens is replayed",
    )
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

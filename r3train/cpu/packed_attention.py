"""Core attention for machines without Transformer Engine: packed sequences, GQA, context parallel,
sliding windows and sinks.

Megatron's own DotProductAttention refuses packed (thd) input and context parallelism.  This class
has the same constructor and forward.  It spreads the pack into a [samples, longest] batch with
index maps, runs torch's scaled_dot_product_attention with a causal mask over positions, and gathers
back; under context parallelism it all-gathers K and V first.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class _Places:
    """The places of local rows in the padded batch.

    sequence, slot: int64[n], row -> [sequence, slot]; position: int64[n] inside its sequence.
    """

    sequence: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    width: int


def _places(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> _Places:
    lengths, device = cu_seqlens.diff().long(), cu_seqlens.device
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    position = torch.arange(len(sequence), device=device) - cu_seqlens[:-1].long()[sequence]
    if cp_size > 1:
        chunk = position // (lengths // (2 * cp_size))[sequence]
        is_local = (chunk == cp_rank) | (chunk == 2 * cp_size - 1 - cp_rank)
        sequence, position = sequence[is_local], position[is_local]
    local_lengths = lengths // cp_size
    starts = torch.cumsum(local_lengths, 0) - local_lengths
    slot = torch.arange(len(sequence), device=device) - starts[sequence]
    return _Places(sequence, slot, position, int(local_lengths.max()))


class PackedCoreAttention(MegatronModule):
    """softmax(QK^T)V over packed sequences on any device, without Transformer Engine."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        cp_group = pg_collection.cp if pg_collection is not None else None
        self.cp_group = cp_group or parallel_state.get_context_parallel_group()
        self.window: int | None = None  # tokens before its own that a query sees
        if config.window_size and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0]
        if config.softmax_type == "learnable":
            heads = (
                config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
            )
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        else:
            self.softmax_offset = None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Name the axis of the sinks for Megatron's checkpoints."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        *,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSeqParams | None = None,
    ):
        """Attend.  query: [n, h, d] or [n, 1, h, d], rows of this rank; key, value: their heads.

        Returns [n, h*d], or [n, 1, h*d] where the input had the batch dimension.
        """
        assert packed_seq_params is not None, "the actor always packs"
        batched = query.dim() == 4
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        cu_seqlens = packed_seq_params.cu_seqlens_q
        q_places = _places(cu_seqlens, cp_size, cp_rank)
        k_places = q_places
        if cp_size > 1:  # the backward of this gather is a reduce-scatter
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
            k_places = _all_ranks_places(cu_seqlens, cp_size)

        num_sequences = len(cu_seqlens) - 1
        q_positions = _spread(q_places.position, q_places, num_sequences, fill=-1)
        k_positions = _spread(k_places.position, k_places, num_sequences, fill=1 << 30)
        mask = k_positions[:, None, :] <= q_positions[:, :, None]
        if self.window is not None:
            mask &= k_positions[:, None, :] >= q_positions[:, :, None] - self.window
        # a filler query attends to everything: it is not gathered back, but must not be NaN
        mask = (mask | (q_positions < 0)[:, :, None])[:, None]
        q, k, v = (
            _spread(x, places, num_sequences).transpose(1, 2)
            for x, places in ((query, q_places), (key, k_places), (value, k_places))
        )
        if self.softmax_offset is not None:
            # one more key of zeros whose bias is the sink, one more value of zeros
            bias = q.new_zeros(mask.shape).masked_fill(~mask, float("-inf"))
            sinks = self.softmax_offset.to(q.dtype).view(1, -1, 1, 1)
            sinks = sinks.expand(q.shape[0], -1, q.shape[2], 1)
            mask = torch.cat([bias.expand(-1, q.shape[1], -1, -1), sinks], -1)
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        # sinks make it a mask with a gradient, which torch's faster kernel takes in passes without
        # gradients only: a step's first log-probs would not be those of the pass before, to the last bit
        kernels = sdpa_kernel(SDPBackend.MATH) if self.softmax_offset is not None else nullcontext()
        with kernels:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=True
            )
        out = out.transpose(1, 2)[q_places.sequence, q_places.slot].flatten(1)
        return out.unsqueeze(1) if batched else out


def _all_ranks_places(cu_seqlens: torch.Tensor, cp_size: int) -> _Places:
    """Return the places of all ranks' rows, in rank order, in a batch of whole sequences."""
    parts = [_places(cu_seqlens, cp_size, r) for r in range(cp_size)]
    sequence = torch.cat([p.sequence for p in parts])
    position = torch.cat([p.position for p in parts])
    # whole sequences: a row's slot is its position
    width = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return _Places(sequence, position, position, width)


def _spread(x: torch.Tensor, places: _Places, num_sequences: int, fill: int = 0) -> torch.Tensor:
    """Spread rows [n, ...] into a batch [sequences, width, ...]."""
    out = x.new_full((num_sequences, places.width, *x.shape[1:]), fill)
    return out.index_put((places.sequence, places.slot), x)

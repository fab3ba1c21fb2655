"""SGLang's torch_native attention on a CPU, with a decode step that does not loop over the requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from r3train.patches import overrides


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Group requests so that padding to the longest of a group at most doubles the group's tokens.

    >>> alike([5, 100, 6, 90])
    [[0, 2], [3, 1]]
    """
    groups: list[list[int]] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and lengths[i] * (len(groups[-1]) + 1) <= 2 * (total + lengths[i]):
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return groups


class Scratch:
    """Memory that rows are copied to again and again.

    New memory for every layer of every token costs more, in page faults, than the attention.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take_rows(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Copy rows of a cache [slots, heads, size]: [rows, heads * size], valid until the next call."""
        matrix = cache.view(len(cache), -1)  # whose rows are taken faster than a cache's
        shape = len(slots), matrix.shape[1]
        if self._memory.numel() < math.prod(shape) or self._memory.dtype != cache.dtype:
            self._memory = cache.new_empty(2 * math.prod(shape))
        return torch.index_select(
            matrix, 0, slots, out=self._memory[: math.prod(shape)].view(shape)
        )


@dataclass(frozen=True)
class Decoding:
    """B requests that decode together: each one's newest token attends to its tokens."""

    requests: torch.Tensor  # int64[B], places in the batch
    slots: torch.Tensor  # int64[B * longest], of their tokens in the caches
    lengths: torch.Tensor  # int[B], the newest token included

    @classmethod
    def from_tables(
        cls,
        requests: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> Decoding:
        """Take these requests out of SGLang's tables of a batch."""
        lengths = seq_lens[requests]
        slots = req_to_token[req_pool_indices[requests], : int(lengths.max())].long()
        # what is behind a request's length may be a slot of nobody with a NaN, which no mask hides
        is_token = torch.arange(slots.shape[1]) < lengths[:, None]
        return cls(requests, torch.where(is_token, slots, slots[:, :1]).view(-1), lengths)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scaling: float | None,
        window: int | None,
        scratch: Sequence[Scratch],
    ) -> torch.Tensor:
        """The attention of the requests' rows of query [requests, heads, size]: [B, heads, size of a value].

        caches: [slots, key heads, size]; window: how many tokens before the newest it sees;
        scratch: for the keys and for the values.
        """
        num, (_, heads, size) = len(self.requests), query.shape
        positions = torch.arange(len(self.slots) // num)
        visible = positions < self.lengths[:, None]
        if window is not None:
            visible &= positions >= self.lengths[:, None] - 1 - window
        # the heads that share a key head are like several queries of it
        grouped = query.index_select(0, self.requests).view(num, k_cache.shape[1], -1, size)
        keys, values = (
            buffer.take_rows(cache, self.slots).view(num, -1, *cache.shape[1:]).transpose(1, 2)
            for cache, buffer in zip((k_cache, v_cache), scratch, strict=True)
        )
        out = F.scaled_dot_product_attention(
            grouped,
            keys.to(query.dtype),
            values.to(query.dtype),
            attn_mask=visible[:, None, None],
            scale=scaling,
        )
        return out.reshape(num, heads, -1)


overrides(
    TorchNativeAttnBackend,
    "_run_sdpa_forward_decode",
    expects="(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=None,"
    " scaling=None, enable_gqa=False, causal=False, is_cross_attn=False, sliding_window_size=None)",
    why="it loops over the requests",
)


class BatchedAttention(TorchNativeAttnBackend):
    """One call attends for all requests that are about as long, where SGLang's own loops over them."""

    _scratch = Scratch(), Scratch()

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self._groups = None  # of this forward, the same in all layers

    def _run_sdpa_forward_decode(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):  # SGLang's own signature; query, output: [requests, heads, size]
        if self._groups is None:
            self._groups = [
                Decoding.from_tables(torch.tensor(group), req_to_token, req_pool_indices, seq_lens)
                for group in alike(seq_lens.tolist())
            ]
        for group in self._groups:
            given = scaling, sliding_window_size, self._scratch
            out = group.attend(query, k_cache, v_cache, *given)
            output.index_copy_(0, group.requests, out)
        return output

"""Plain twins of SGLang's sparse attention (DeepSeek-V3.2, GLM-5): its indexer, and attention to what it chose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

from r3train.cpu.batched_attention import BatchedAttention
from r3train.patches import overrides, patch


class Request(NamedTuple):
    """A request of a batch: its rows there, and the slots of its tokens in the caches, up to its newest."""

    rows: slice
    slots: torch.Tensor  # int64[n]

    @property
    def behind(self) -> torch.Tensor:
        """bool[rows, n]: the tokens that come after a row's own."""
        num, length = self.rows.stop - self.rows.start, len(self.slots)
        queries = torch.arange(length - num, length)
        return torch.arange(length) > queries[:, None]


def requests_of(forward_batch: Any, req_to_token: torch.Tensor) -> Iterator[Request]:
    """Yield the requests of a batch, in the order of their rows."""
    counts, start = forward_batch.extend_seq_lens, 0
    if forward_batch.forward_mode.is_decode():
        counts = torch.ones_like(forward_batch.seq_lens)
    batch = zip(counts.tolist(), forward_batch.req_pool_indices, forward_batch.seq_lens.tolist())
    for count, row, length in batch:
        yield Request(slice(start, start + count), req_to_token[row, :length].long())
        start += count


def choose(
    query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, behind: torch.Tensor, topk: int
) -> torch.Tensor:
    """Return the topk tokens of highest score of every row, int32[m, topk]; -1 where there are fewer.

    query: float[m, heads, size], keys: float[n, size], weights: float[m, heads], behind: bool[m, n].
    """
    scores = F.relu(torch.einsum("mhd,nd->mhn", query, keys))
    scores = torch.einsum("mh,mhn->mn", weights, scores).masked_fill(behind, float("-inf"))
    # of equal scores the first: those of tokens that no head looks at are 0, and topk takes any of them
    best, chosen = scores.sort(dim=1, descending=True, stable=True)
    best, chosen = best[:, :topk], chosen[:, :topk]
    chosen = chosen.masked_fill(best == float("-inf"), -1)
    return F.pad(chosen, (0, topk - chosen.shape[1]), value=-1).int()


def _forward(
    self, x, q_lora, positions, forward_batch, layer_id, return_indices=True
):  # noqa: ANN001 - SGLang's own call signature
    """Choose tokens: int32[rows, index_topk], positions in the row's request.

    Keys stay in float32, and are not rotated by a Hadamard matrix, which leaves all products as they are.
    """
    query, key = self.wq_b(q_lora)[0], self.k_norm(self.wk(x)[0])
    query = query.view(-1, self.n_heads, self.head_dim)
    rotated = query[..., : self.rope_head_dim], key[..., None, : self.rope_head_dim]
    turned = self.rotary_emb(positions, *(part.contiguous() for part in rotated))
    for part, part_turned in zip(rotated, turned):
        part.copy_(part_turned.view_as(part))
    if getattr(self, "index_keys", None) is None:
        # a slot of the cache may be older than this batch: kept for all slots
        slots = len(get_token_to_kv_pool().get_key_buffer(layer_id))
        self.index_keys = torch.zeros(slots, self.head_dim)
    self.index_keys[forward_batch.out_cache_loc] = key.float()
    if not return_indices:
        return None
    weights = F.linear(x.float(), self.weights_proj.weight.float())
    weights = weights * self.n_heads**-0.5 * self.softmax_scale
    tables = get_attn_backend().req_to_token_pool.req_to_token
    chosen = torch.full((len(x), self.index_topk), -1, dtype=torch.int32)
    for one in requests_of(forward_batch, tables):
        keys = self.index_keys[one.slots]
        given = query[one.rows].float(), keys, weights[one.rows], one.behind
        chosen[one.rows] = choose(*given, self.index_topk)
    return maybe_capture_indexer_topk(layer_id, chosen)


_FORWARD_SIGNATURE = "(self, q, k, v, layer, forward_batch, save_kv_cache=True)"
for _name in ("forward_extend", "forward_decode"):
    overrides(BatchedAttention, _name, expects=_FORWARD_SIGNATURE, why="it attends to all tokens")


class SparseAttention(BatchedAttention):
    """Attention of each row to the tokens that its indexer chose."""

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, topk_indices=None
    ):  # noqa: ANN001, ANN201 - SGLang's own call signature
        dense = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._sparse(q, layer, forward_batch, topk_indices, dense)

    def forward_decode(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, topk_indices=None
    ):  # noqa: ANN001, ANN201 - SGLang's own call signature
        dense = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._sparse(q, layer, forward_batch, topk_indices, dense)

    def _sparse(
        self, q: torch.Tensor, layer: Any, forward_batch: Any, chosen: Any, out: torch.Tensor
    ) -> torch.Tensor:
        """Put sparse attention in the place of the dense one of requests with more tokens than are chosen."""
        pool = self.token_to_kv_pool
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        result = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        for one in requests_of(forward_batch, self.req_to_token_pool.req_to_token):
            if len(one.slots) <= chosen.shape[1]:
                continue
            positions = chosen[one.rows].long()
            # one more column takes the places without a token
            visible = torch.zeros(len(positions), len(one.slots) + 1, dtype=torch.bool)
            visible.scatter_(1, positions.masked_fill(positions < 0, len(one.slots)), True)
            keys, values = (cache[one.slots].transpose(0, 1).to(q.dtype) for cache in caches)
            attended = F.scaled_dot_product_attention(
                query[one.rows].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=visible[:, :-1],
                scale=layer.scaling,
                enable_gqa=True,
            )
            result[one.rows] = attended[0].transpose(0, 1)
        return out


def serve_sparse_attention() -> None:
    """Put in the twin of the indexer, which SGLang has as kernels for CUDA."""
    patch(
        Indexer,
        "forward_native",
        _forward,
        expects="(self, *args, **kwargs)",
        why="it has no plain torch",
    )

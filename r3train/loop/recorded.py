"""The rollout's side of the evidence: fingerprints and counts of the rows as they were decoded.

Rank 0 takes them from its samples.  With --route-stores every leader takes them from the rows in
its store, and the sum of the leaders' tables is the table that rank 0 would have found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from r3train.routing.fingerprint import (
    indexer_fingerprint,
    kept_fingerprint,
    recorded_rows,
    rollout_fingerprint,
)
from r3train.ids import token_uids
from r3train.types import RolloutSample

_SLOTS_AT_ONCE = 1 << 17


def decoded_rows(sample: RolloutSample) -> Iterator[tuple[int, np.ndarray]]:
    """The rows that a sample's answers brought, each part with the position of its first row.

    These are the rows before stitching and cutting into turns, so that a mistake there shows as
    different fingerprints.  A sample read from a file has its stored rows instead.
    """
    if sample.decoded or sample.routed_experts is None:
        yield from sample.decoded
    else:
        yield 0, sample.routed_experts


def decoded_sampling_mask(sample: RolloutSample) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The sampling masks that a sample's answers brought: index of the first token, counts, ids.

    They are those before stitching and cutting, as in ``decoded_rows``.
    """
    if sample.decoded_masks or sample.mask_counts is None or sample.mask_ids is None:
        yield from sample.decoded_masks
    else:
        yield 0, sample.mask_counts, sample.mask_ids


def decoded_indexer(sample: RolloutSample) -> Iterator[tuple[int, np.ndarray]]:
    """The choices of an indexer that a sample's answers brought: position of the first row, bits.

    They are those before stitching and cutting, as in ``decoded_rows``.
    """
    if sample.decoded_indexer or sample.indexer_topk is None:
        yield from sample.decoded_indexer
    else:
        yield sample.num_tokens - 1 - len(sample.indexer_topk), sample.indexer_topk


class Recorded:
    """Totals of each data-parallel rank's samples, one number a MoE layer.

    fingerprints: uint64[dp, l]; whole_rows: int64[dp, l], rows whose every slot was reported.  Both are views of
    table: int64[2, dp, l], to be added up over ranks.
    """

    def __init__(self, num_data_ranks: int, moe_layers: Sequence[int]) -> None:
        self.layers = np.asarray(moe_layers)
        self.table = np.zeros((2, num_data_ranks, len(self.layers)), dtype=np.int64)
        self.fingerprints, self.whole_rows = self.table[0].view(np.uint64), self.table[1]

    def add(self, data_rank: int, parts: Iterable[tuple[int, np.ndarray, int]]) -> None:
        """Add rows of samples: (sample id, uint8/uint16 [R, L, K], position of the first row) each."""
        uids: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        slots = 0
        for sample_id, part, first in parts:
            uids.append(token_uids(sample_id, first + len(part))[first:])
            rows.append(part)
            slots += part.size
            if slots >= _SLOTS_AT_ONCE:
                self._add_rows(data_rank, uids, rows)
                uids, rows, slots = [], [], 0
        if rows:
            self._add_rows(data_rank, uids, rows)

    def _add_rows(self, data_rank: int, uids: list[np.ndarray], rows: list[np.ndarray]) -> None:
        """Add rows, as many at once as a cache of the processor holds."""
        all_uids = np.concatenate(uids)
        all_rows = rows[0] if len(rows) == 1 else np.concatenate(rows)
        step = max(1, _SLOTS_AT_ONCE // max(1, all_rows[:1].size))
        for i in range(0, len(all_rows), step):
            part = all_rows[i : i + step]
            self.fingerprints[data_rank] += rollout_fingerprint(
                all_uids[i : i + step], part, self.layers
            )
            self.whole_rows[data_rank] += recorded_rows(part, self.layers)

    def add_sampling_mask(
        self, data_rank: int, sample_id: int, counts: np.ndarray, ids: np.ndarray, first: int
    ) -> None:
        """Add the sampling masks of a sample's tokens from index ``first`` on, as ``RolloutSample`` has them."""
        (layer,) = self.layers.tolist()
        fingerprint = kept_fingerprint(sample_id, counts, ids, layer, first)
        self.fingerprints[data_rank] += np.array(
            [fingerprint]
        )  # a sum of arrays wraps without a warning
        self.whole_rows[data_rank, 0] += int((counts > 0).sum())

    def add_indexer(self, data_rank: int, sample_id: int, bits: np.ndarray, first: int) -> None:
        """Add the choices of an indexer, uint64[R, L, W] of all decoder layers, from row ``first`` on."""
        self.fingerprints[data_rank] += indexer_fingerprint(sample_id, bits, self.layers, first)
        self.whole_rows[data_rank] += bits.any(axis=2).sum(axis=0)

"""The tokens that sampling kept, applied to vocabulary-parallel logits, as the engine drew among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core import parallel_state

from r3train.layout.rows import take_ragged
from r3train.types import RankSlice

# The logit of a token that sampling dropped: its probability is exactly 0, and unlike -inf it makes no
# NaN of an entropy.
DROPPED = -1e30


@dataclass(frozen=True)
class SamplingMask:
    """The sampling masks of n rows of a slice, e in all; a row without any keeps the whole vocabulary.

    Every tensor-parallel rank has them all, and applies those of its own shard of the vocabulary.
    """

    source: RankSlice  # all its rows, for counts that the host makes
    counts: np.ndarray  # int32[n], tokens of each row's sampling mask, on the host
    rows: torch.Tensor  # int64[e], the row of each token of a sampling mask
    ids: torch.Tensor  # int64[e]
    labels: torch.Tensor  # int64[n]
    limited: torch.Tensor  # bool[n], rows that have sampling masks
    versions: torch.Tensor  # int32[n], weights that drew the label, -1 = not known
    uids: torch.Tensor  # int64[n]

    @classmethod
    def from_slice(
        cls, s: RankSlice, rows: np.ndarray, device: torch.device
    ) -> SamplingMask | None:
        """Copy the sampling masks of a slice's rows, int64[n], to the device; None if it has none to apply."""
        if s.mask_counts is None or s.mask_ids is None or s.mask_versions is None:
            return None
        counts, ids = take_ragged(s.mask_counts, s.mask_ids, rows)

        def move(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True)

        return cls(
            source=s,
            counts=counts,
            rows=move(np.repeat(np.arange(len(rows)), counts)),
            ids=move(ids.astype(np.int64)),
            labels=move(s.labels[rows]),
            limited=move(counts > 0),
            versions=move(s.mask_versions[rows]),
            uids=move(s.token_uids[rows]),
        )

    def take(self, chunk: slice) -> SamplingMask:
        """Those of a slice of the rows, which count from its first."""
        first = int(self.counts[: chunk.start].sum())
        entries = slice(first, first + int(self.counts[chunk].sum()))
        return replace(
            self,
            counts=self.counts[chunk],
            rows=self.rows[entries] - chunk.start,
            ids=self.ids[entries],
            labels=self.labels[chunk],
            limited=self.limited[chunk],
            versions=self.versions[chunk],
            uids=self.uids[chunk],
        )

    @property
    def widest(self) -> int:
        """The most tokens that a row kept."""
        return int(self.counts.max(initial=0))

    def left_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Give the tokens that were not kept the logit ``DROPPED``.

        logits: float32[n, vocab / tp] at the rollout's temperature.  Returns another tensor.
        """
        first, size = shard_of(logits)
        local = self.ids - first
        # one place after the last takes the tokens of other shards: nothing waits for a count
        places = torch.where(
            (local >= 0) & (local < size), self.rows * size + local, logits.numel()
        )
        kept = torch.zeros(logits.numel() + 1, dtype=torch.bool, device=logits.device)
        kept.index_fill_(0, places, True)
        kept = kept[:-1].view_as(logits) | ~self.limited[:, None]
        return logits.masked_fill(~kept, DROPPED)


def shard_of(logits: torch.Tensor) -> tuple[int, int]:
    """The first token id of this rank's shard of the vocabulary, and the size of a shard."""
    size = logits.shape[-1]
    return parallel_state.get_tensor_model_parallel_rank() * size, size


def was_left(logits: torch.Tensor) -> torch.Tensor:
    """True for the tokens that ``SamplingMask.left_of`` left."""
    return logits > DROPPED / 2

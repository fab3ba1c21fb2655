"""Log-probs and entropy of vocabulary-parallel logits, some rows at a time.

One row of a large vocabulary takes more memory than the row's whole layer.  So no float32 copy of all
logits is made: a chunk of rows is converted, scaled and summed up, forward and again backward, and the
gradient overwrites the logits.  Next to the logits, in the model's own dtype, there are never more than
three float32 tensors of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from r3train.trainer.megatron.sampling_mask import SamplingMask, shard_of, was_left

# (a chunk's sampling masks, its logits before and after they were applied, float32[rows, vocab / tp])
SeeKept = Callable[[SamplingMask, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Draw:
    """The way in which the engine drew the labels of n rows."""

    labels: torch.Tensor  # int64[n]
    temperature: float  # SGLang divides the logits by it, and keeps tokens of what comes out
    kept: SamplingMask | None = None  # None: of the whole vocabulary
    see_kept: SeeKept | None = None  # called once a chunk, in the forward only
    chunk_size: int = -1  # rows at a time; -1: all

    def chunks(self) -> Iterator[slice]:
        """Slices of the rows, in order."""
        rows = self.labels.shape[0]
        size = self.chunk_size if self.chunk_size > 0 else max(rows, 1)
        return (slice(first, min(first + size, rows)) for first in range(0, rows, size))

    def logits_of(self, logits: torch.Tensor, chunk: slice, *, see: bool = False) -> torch.Tensor:
        """Copy a chunk's logits as the engine drew from them, float32[rows, vocab / tp]."""
        scaled = logits[chunk].to(torch.float32, copy=True)
        if self.temperature != 1.0:
            scaled /= self.temperature
        if self.kept is None:
            return scaled
        kept = self.kept.take(chunk)
        left = kept.left_of(scaled)
        if see and self.see_kept is not None:
            self.see_kept(kept, scaled, left)
        return left

    def places(self, chunk: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's place in this rank's shard, int64[rows, 1], and True where it is there."""
        first, size = shard_of(logits)
        place = self.labels[chunk, None] - first
        return place.clamp(0, size - 1), (place >= 0) & (place < size)


def log_probs_and_entropy(
    logits: torch.Tensor, draw: Draw, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each row's label, and entropy of each row's next token: float32[n] both.

    logits: [1, n, vocab / tp], overwritten by their gradient in the backward.  A collective of the
    tensor-parallel ranks.  Without ``with_entropy`` the second is None, and the first is the same.
    """
    # not logits[0], whose gradient would be another copy of the logits
    log_probs, entropy = _LogProbs.apply(logits.flatten(0, 1), draw, with_entropy)
    return log_probs, entropy if with_entropy else None


class _LogProbs(torch.autograd.Function):
    """Gradient of a logit: (its token is the label) - p for the log-prob, -p (log p + H) for the entropy."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, draw: Draw, with_entropy: bool) -> tuple:
        ctx.set_materialize_grads(False)
        facts = logits.new_zeros(4, logits.shape[0], dtype=torch.float32)
        highest, log_probs, totals, entropy = facts
        for chunk in draw.chunks():
            rows = draw.logits_of(logits, chunk, see=True)
            highest[chunk] = _over_vocabulary(rows.amax(-1), torch.distributed.ReduceOp.MAX)
            rows -= highest[chunk, None]
            place, is_local = draw.places(chunk, rows)
            sums = [torch.where(is_local, rows.gather(1, place), 0)[:, 0]]
            weights = rows.exp()
            sums.append(weights.sum(-1))
            if with_entropy:
                sums.append(rows.mul_(weights).sum(-1))
            sums_of_ranks = _over_vocabulary(torch.stack(sums), torch.distributed.ReduceOp.SUM)
            totals[chunk] = sums_of_ranks[1]
            log_probs[chunk] = sums_of_ranks[0] - sums_of_ranks[1].log()
            if with_entropy:
                entropy[chunk] = sums_of_ranks[1].log() - sums_of_ranks[2] / sums_of_ranks[1]
        ctx.save_for_backward(logits, highest, totals, entropy)
        ctx.draw = draw
        return log_probs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None):
        logits, highest, totals, entropy = ctx.saved_tensors
        draw, gradient = ctx.draw, logits.detach()
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(totals)
        for chunk in draw.chunks():
            rows = draw.logits_of(logits, chunk)
            left = was_left(rows) if draw.kept is not None else None
            rows -= highest[chunk, None]
            share = grad_log_probs[chunk, None]
            p = rows.exp() / totals[chunk, None]
            if grad_entropy is not None:
                surprise = rows.sub_(totals[chunk, None].log()).add_(entropy[chunk, None])
                p *= surprise.mul_(grad_entropy[chunk, None]).add_(share)
            else:
                p *= share
            place, is_local = draw.places(chunk, p)
            p.neg_().scatter_add_(1, place, torch.where(is_local, share, 0))
            if left is not None:
                p.masked_fill_(~left, 0)
            if draw.temperature != 1.0:
                p /= draw.temperature
            gradient[chunk] = p
        return gradient, None, None


def _over_vocabulary(values: torch.Tensor, operation: Any) -> torch.Tensor:
    """Reduce over the ranks that hold the other shards of the vocabulary."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(values, op=operation, group=group)
    return values

"""Input and result of a policy loss, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from r3train.algo.divergence import zero_outside

# (values, "sum" or "max") -> the same over all ranks that hold rows of the same samples
OverRanks = Callable[[Tensor, str], Tensor]


def on_this_rank(values: Tensor, operation: str) -> Tensor:
    """The ``OverRanks`` of whole samples: no other rank holds a part of them."""
    return values


@dataclass(frozen=True, slots=True)
class LossRows:
    """One rank's rows of a microbatch, n of them: row t is about the prediction of token t+1.

    ``mask`` is False on prompts, on an environment's words and on padding.  A sample may be cut over
    context-parallel ranks.  ``sample_sum`` and ``sample_max`` take all of its rows, so every rank that holds
    some of them must call these equally often.  Their results carry no gradient.
    """

    log_probs: Tensor  # float[n], the actor's, with gradient
    # float[n], the ratio's denominator: the actor's before the rollout's first optimizer step, or
    # with --ratio-anchor rollout the engine's
    old_log_probs: Tensor
    rollout_log_probs: Tensor  # float[n], the engine's
    advantages: Tensor  # float[n]
    mask: Tensor  # bool[n], rows that count
    entropy: Tensor  # float[n], with gradient where entropy_coef is above 0
    samples: Tensor  # int64[n], the row's place among the B samples of the microbatch
    loss_weights: Tensor  # float[B], of each row of a sample in the loss (--loss-aggregation)
    ref_log_probs: Tensor | None = None  # float[n], the reference's; None without kl_loss_coef
    teacher_log_probs: Tensor | None = None  # float[n], the teacher's; None without use_opd
    over_ranks: OverRanks = on_this_rank
    # int64[n] in 0..num_ages-1, rollouts by which the weights that sampled the row's token were behind
    ages: Tensor | None = None
    num_ages: int = 1
    row_classes: Tensor | None = None  # int64[n], RowClass or UNKNOWN_CLASS; None without R3

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool, self.mask.dtype
        assert self.samples.shape == self.log_probs.shape, tuple(self.samples.shape)
        for name, rows in self._streams().items():
            assert rows.shape == self.log_probs.shape, (name, tuple(rows.shape))

    def _streams(self) -> dict[str, Tensor]:
        names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "entropy")
        streams = {n: getattr(self, n) for n in (*names, "ref_log_probs", "teacher_log_probs")}
        return {name: rows for name, rows in streams.items() if rows is not None}

    def masked(self) -> LossRows:
        """The same rows with 0 outside the mask and no gradient but the actor's own."""
        carries_gradient = ("log_probs", "entropy")
        streams = {
            name: zero_outside(rows if name in carries_gradient else rows.detach(), self.mask)
            for name, rows in self._streams().items()
        }
        return replace(self, **streams)

    def sample_sum(self, values: Tensor) -> Tensor:
        """Add up each sample's masked rows: float[..., n] -> float[..., B], detached."""
        values = zero_outside(values.detach(), self.mask)
        sums = values.new_zeros(*values.shape[:-1], self.loss_weights.shape[0])
        return self.over_ranks(sums.index_add_(-1, self.samples, values), "sum")

    def sample_max(self, values: Tensor) -> Tensor:
        """Find the largest of each sample's masked rows: float[n], none below 0 -> float[B]."""
        values = zero_outside(values.detach(), self.mask)
        largest = values.new_zeros(self.loss_weights.shape[0])
        return self.over_ranks(largest.scatter_reduce_(0, self.samples, values, "amax"), "max")

    def sample_mean(self, values: Tensor) -> Tensor:
        """Average each sample's masked rows: float[..., n] -> float[..., B]; 0 without any."""
        ones = torch.ones_like(self.log_probs).expand_as(values)
        both = self.sample_sum(torch.stack([values, ones]))
        return both[0] / both[1].clamp(min=1)

    def spread_over_rows(self, per_sample: Tensor) -> Tensor:
        """Give every row its sample's value: [B] -> [n]."""
        return per_sample[self.samples]


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A policy loss for each row, and metrics about it.

    ``sums`` and ``maxima`` are detached scalars on the rows' device, over the masked rows.  They
    are added up (maxima: compared) over microbatches and ranks; a sum is then divided by the
    number of loss tokens, and both become metrics under ``train/``.
    """

    loss: Tensor  # float[n], with gradient
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

"""Input and result of a policy loss, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from r3train.algo.divergence import zero_outside


@dataclass(frozen=True, slots=True)
class LossRows:
    """One rank's rows of a microbatch, n of them: row t is about the prediction of token t+1.

    ``mask`` is False on prompts, on an environment's words and on padding.
    """

    log_probs: Tensor  # float[n], the actor's, with gradient
    old_log_probs: Tensor  # float[n], the actor's before the rollout's first optimizer step
    rollout_log_probs: Tensor  # float[n], the engine's
    advantages: Tensor  # float[n]
    mask: Tensor  # bool[n], rows that count
    entropy: Tensor  # float[n], with gradient where entropy_coef is above 0
    ref_log_probs: Tensor | None = None  # float[n], the reference's; None without kl_loss_coef

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool, self.mask.dtype
        for name, rows in self._tensors().items():
            assert rows.shape == self.log_probs.shape, (name, tuple(rows.shape))

    def _tensors(self) -> dict[str, Tensor]:
        names = [name for name in self.__slots__ if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in names}

    def masked(self) -> LossRows:
        """The same rows with 0 outside the mask and no gradient but the actor's own."""
        carries_gradient = ("log_probs", "entropy")
        return replace(
            self,
            **{
                name: zero_outside(rows if name in carries_gradient else rows.detach(), self.mask)
                for name, rows in self._tensors().items()
                if name != "mask"
            },
        )


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

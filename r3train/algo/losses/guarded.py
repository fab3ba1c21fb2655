"""A user's policy loss inside a step of many ranks: its failure leaves no rank alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from r3train.algo.losses.policy_losses import FLAG
from r3train.algo.policy_loss import rows_without_values
from r3train.algo.loss_rows import LossRows, RowLoss, on_this_rank
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.user_code import UserCodeFailed, running_user_code


class GuardedLoss:
    """Wrap a user's loss: its exceptions are collected in ``errors``, and its rows and metrics become NaN.

    A loss that is not finite skips the step on all ranks, so they go on together.  After its first
    failure the loss is not called again.  Its backward pass runs here too, not in the model's.

    Context-parallel ranks hold parts of the same samples, and wait for one another in ``sample_sum``.
    Before each of those, and once at the end, they say whether one of them has failed.

    loss: of ``configured_loss``; metrics: of ``metric_names``.
    """

    def __init__(
        self,
        loss: Callable[..., RowLoss],
        algorithm: AlgorithmSection,
        metrics: Sequence[Sequence[str]],
    ):
        self.errors: list[str] = []  # what it raised on this rank
        self._loss = loss
        self._name = algorithm.policy_loss
        on_trial = loss(rows_without_values(algorithm), algorithm)
        self._trial_metrics = on_trial.sums.keys(), on_trial.maxima.keys()
        self._metrics = [[m for m in names if m != "num_tokens"] for names in metrics]
        self._failed = False  # here, or on a rank with the same samples

    def __call__(self, rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
        is_cut = rows.over_ranks is not on_this_rank
        self._failed |= bool(self.errors)  # of a backward pass

        def one_failed(here: bool) -> bool:
            flag = torch.full((), float(here), device=rows.log_probs.device)
            return bool(rows.over_ranks(flag, "max")) if is_cut else here

        def over_ranks(values: Tensor, operation: str) -> Tensor:
            self._failed = self._failed or one_failed(False)
            if not self._failed:
                return rows.over_ranks(values, operation)
            raise UserCodeFailed("it failed on another rank that holds rows of these samples")

        if self._failed:
            one_failed(True)
            return self._nothing(rows)
        leaves = [
            x.detach().requires_grad_(x.requires_grad) for x in (rows.log_probs, rows.entropy)
        ]
        guarded_rows = replace(rows, log_probs=leaves[0], entropy=leaves[1])
        if is_cut:
            guarded_rows = replace(guarded_rows, over_ranks=over_ranks)
        try:
            found = self._loss(guarded_rows, algorithm)
            with running_user_code(f"{FLAG} {self._name}"):
                self._check(found)
        except UserCodeFailed as error:
            if not self._failed:
                self.errors.append(str(error))
                self._failed = True
                one_failed(True)
            return self._nothing(rows)
        if self._failed or one_failed(False):
            self._failed = True
            return self._nothing(rows)
        return replace(found, loss=self._with_gradients(found.loss, leaves, rows))

    def _check(self, found: RowLoss) -> None:
        """Raise ValueError for metric names other than the trial's: ranks would disagree about them."""
        names = found.sums.keys(), found.maxima.keys()
        if names != self._trial_metrics:
            got, expected = ([*map(sorted, each)] for each in (names, self._trial_metrics))
            raise ValueError(f"returned sums and maxima {got}, and on trial {expected}")
        for name, value in (found.sums | found.maxima).items():
            if not torch.is_tensor(value) or value.shape != () or value.requires_grad:
                raise ValueError(f"returned {value!r} as {name}, expected a detached scalar")
        if not found.loss.requires_grad:
            raise ValueError("returned a loss without gradient")

    def _with_gradients(self, loss: Tensor, leaves: Sequence[Tensor], rows: LossRows) -> Tensor:
        """The same loss of the step's own tensors; NaN gradients where its backward pass fails."""

        def gradients(loss_gradient: Tensor) -> list[Tensor | None]:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            try:
                with running_user_code(f"{FLAG} {self._name}: its backward pass"):
                    found = torch.autograd.grad(loss, wanted, loss_gradient, allow_unused=True)
            except UserCodeFailed as error:
                self.errors.append(str(error))
                found = [torch.full_like(leaf, math.nan) for leaf in wanted]
            gradients_left = iter(found)
            return [next(gradients_left) if leaf.requires_grad else None for leaf in leaves]

        return _OwnBackward.apply(loss.detach(), gradients, rows.log_probs, rows.entropy)

    def _nothing(self, rows: LossRows) -> RowLoss:
        nan = rows.log_probs.detach().new_full((), math.nan)
        return RowLoss(rows.log_probs * math.nan, *(dict.fromkeys(m, nan) for m in self._metrics))


class _OwnBackward(torch.autograd.Function):
    """A value whose gradients another function computes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Callable, *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, value_gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.gradients(value_gradient))

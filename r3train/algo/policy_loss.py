"""The loss of a microbatch: a policy loss for each row, corrected, with KL and entropy added.

Losses and metrics are sums over the masked rows: the trainer divides by the number of loss tokens
of the whole step, over all microbatches and ranks, so that a token weighs the same wherever it was
packed.  Nothing here reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from r3train.algo.corrections import (
    age_sums,
    class_sums,
    kept_rows,
    log_prob_gap_sums,
    mismatch_sums,
    rollout_weights,
)
from r3train.algo.divergence import kl_estimate, log_ratio, zero_outside
from r3train.algo.loss_rows import LossRows, RowLoss
from r3train.config.algorithm_settings import AlgorithmSection

# (rows, algorithm) -> the loss of each row.  The rows hold 0 outside their mask.
PolicyLoss = Callable[[LossRows, AlgorithmSection], RowLoss]


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """The loss of some rows, with gradient, and detached scalars on the same device.

    Reduce ``sums`` over ranks with SUM and ``maxima`` with MAX, then divide sums by
    ``sums["num_tokens"]``.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def microbatch_loss(
    policy_loss: PolicyLoss, rows: LossRows, algorithm: AlgorithmSection
) -> MicrobatchLoss:
    """Sum ``w (c policy_loss + kl_loss_coef KL - entropy_coef entropy)`` over the masked rows.

    w: the sample's ``loss_weights``.  c: ``rollout_weights``, and 0 for rows that ``kept_rows`` drops.
    With a teacher the advantages are those of ``distilled``.

    Rows outside the mask may hold anything, NaN and -inf included, and give neither loss nor
    gradient.  A mask without a True gives a loss of 0 that still reaches log_probs, so backward
    works on a rank that holds padding only.

    ``sums`` are num_tokens; loss, pg_loss, entropy and, with a reference, kl, each weighted by w; and those
    of corrections.py, of ``distilled`` and of the policy loss.  ``maxima`` are log_prob_gap_max and those of
    the policy loss.
    """
    rows, mask = rows.masked(), rows.mask
    rows, teacher_sums = distilled(rows, algorithm)
    if algorithm.ratio_anchor == "rollout":
        row_loss = policy_loss(replace(rows, old_log_probs=rows.rollout_log_probs), algorithm)
    else:
        row_loss = policy_loss(rows, algorithm)
    sums, maxima = {"num_tokens": mask.sum(), **row_loss.sums, **teacher_sums}, dict(
        row_loss.maxima
    )
    weight = rows.spread_over_rows(rows.loss_weights)  # of a row in the step's loss

    pg_loss = zero_outside(row_loss.loss, mask)
    correction, beyond, correction_sums = rollout_weights(rows, algorithm)
    keep, kept_sums = kept_rows(rows, algorithm)
    sums |= correction_sums | kept_sums
    if correction is not None:
        pg_loss = pg_loss * correction
    if keep is not None:
        pg_loss = zero_outside(pg_loss, keep)
    loss = (pg_loss * weight).sum()
    sums["pg_loss"] = loss.detach()
    if rows.ref_log_probs is not None:
        kl = kl_estimate(algorithm.kl_loss_type, rows.log_probs, rows.ref_log_probs)
        if algorithm.use_unbiased_kl:
            kl = kl * log_ratio(rows.log_probs, rows.old_log_probs).exp().detach()
        kl = (zero_outside(kl, mask) * weight).sum()
        sums["kl"] = kl.detach()
        if algorithm.kl_loss_coef:
            loss = loss + algorithm.kl_loss_coef * kl
    entropy = (rows.entropy * weight).sum()
    sums["entropy"] = entropy.detach()
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * entropy
    gap = log_prob_gap_sums(rows.old_log_probs, rows.rollout_log_probs, mask)
    maxima["log_prob_gap_max"] = gap.pop("log_prob_gap_max")
    sums |= gap | mismatch_sums(rows) | age_sums(rows, correction, beyond, keep) | class_sums(rows)
    sums["loss"] = loss.detach()
    return MicrobatchLoss(loss, sums, maxima)


def distilled(rows: LossRows, algorithm: AlgorithmSection) -> tuple[LossRows, dict[str, Tensor]]:
    """Subtract ``opd_kl_coef (old - teacher)`` from the advantages of masked rows (--use-opd).

    Over tokens that the actor sampled, the mean of the difference estimates KL(actor || teacher).  Returns
    the rows, and the sum of the differences as ``opd_reverse_kl``.  Without a teacher nothing changes and there
    is no sum.
    Source: slime's and NeMo-RL's term of the same name.  slime whitens advantages after this term; here
    they are whitened before it (docs/guide/algorithms.md has the order).
    """
    if rows.teacher_log_probs is None:
        return rows, {}
    reverse_kl = log_ratio(rows.old_log_probs, rows.teacher_log_probs)
    advantages = rows.advantages - algorithm.opd_kl_coef * reverse_kl
    return replace(rows, advantages=advantages), {"opd_reverse_kl": reverse_kl.sum()}


def metric_names(
    policy_loss: PolicyLoss, algorithm: AlgorithmSection, num_ages: int = 1, replayed: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the sums and of the maxima, as every rank must know them.

    num_ages: as in ``LossRows``; replayed: True where rows have classes.
    A pipeline stage that computes no loss learns them from rows without values.  On such rows a policy
    loss that waits for the device raises, so it is found here.
    """
    empty = replace(rows_without_values(algorithm), num_ages=num_ages)
    if replayed:
        empty = replace(empty, row_classes=empty.ages)
    found = microbatch_loss(policy_loss, empty, algorithm)
    return tuple(found.sums), tuple(found.maxima)


def rows_without_values(algorithm: AlgorithmSection) -> LossRows:
    """Rows of a meta device: they have shapes, and reading a value of them raises."""
    rows = [torch.empty(3, device="meta") for _ in range(7)]
    return LossRows(
        log_probs=rows[0].requires_grad_(),
        old_log_probs=rows[1],
        rollout_log_probs=rows[2],
        advantages=rows[3],
        mask=torch.empty(3, dtype=torch.bool, device="meta"),
        entropy=rows[4],
        samples=torch.empty(3, dtype=torch.int64, device="meta"),
        loss_weights=torch.empty(2, device="meta"),
        ref_log_probs=rows[5] if algorithm.needs_reference else None,
        teacher_log_probs=rows[6] if algorithm.use_opd else None,
        ages=torch.empty(3, dtype=torch.int64, device="meta"),
    )

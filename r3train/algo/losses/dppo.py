"""DPPO: a trust region in probabilities, against the engine itself."""

from __future__ import annotations

import torch
from torch import Tensor

from r3train.algo.divergence import log_ratio
from r3train.algo.losses.ppo import ratio_sums
from r3train.algo.loss_rows import LossRows, RowLoss
from r3train.config.algorithm_settings import AlgorithmSection

# weight of the square of new - rollout, over all loss rows
_SQUARE_COEF = 1e-3
_SMALLEST = 1e-7  # keeps the logarithm of 1 - p finite in float32


def dppo_tv(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """Drop the rows that have left the trust region: |p - q| > ``dppo_delta``, moving away.

    p and q are the token's probabilities under actor and engine.  Moving away: A > 0 and p > q, or
    A < 0 and p < q.  The loss is ``-keep A exp(new - rollout) + 1e-3 (new - rollout)^2``.
    Source: arXiv 2602.04879 (binary total variation); the square is prime-rl's.
    """
    p, q = _probabilities(rows)
    return _dppo((p - q).abs(), p, q, rows, algorithm)


def dppo_kl(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """``dppo_tv`` with the binary divergence ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))``.

    Source: arXiv 2602.04879 (binary KL).
    """
    p, q = _probabilities(rows)
    log_rest = torch.log1p(-q.clamp(max=1 - _SMALLEST)) - torch.log1p(-p.clamp(max=1 - _SMALLEST))
    divergence = q * (rows.rollout_log_probs - rows.log_probs.detach()) + (1 - q) * log_rest
    return _dppo(divergence, p, q, rows, algorithm)


def _probabilities(rows: LossRows) -> tuple[Tensor, Tensor]:
    return rows.log_probs.detach().exp(), rows.rollout_log_probs.exp()


def _dppo(
    divergence: Tensor, p: Tensor, q: Tensor, rows: LossRows, algorithm: AlgorithmSection
) -> RowLoss:
    gap = log_ratio(rows.log_probs, rows.rollout_log_probs)
    ratio = gap.exp()
    away = (p - q) * rows.advantages > 0
    dropped = away & (divergence > algorithm.dppo_delta)
    loss = -(ratio * rows.advantages).masked_fill(dropped, 0.0) + _SQUARE_COEF * gap.square()
    return RowLoss(loss, sums=ratio_sums(ratio, dropped, rows))

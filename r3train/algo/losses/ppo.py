"""PPO's clipped surrogate, and GSPO's, which clips a sample's ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from r3train.algo.divergence import log_ratio, zero_outside
from r3train.algo.loss_rows import LossRows, RowLoss
from r3train.config.algorithm_settings import AlgorithmSection

# log of the largest ratio of a sample
_MAX_LOG_SAMPLE_RATIO = 10.0


def ppo(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """Take ``-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)`` of each row, r = new / old.

    A row is clipped if r > 1 + eps_clip_high and A > 0, or r < 1 - eps_clip and A < 0; its gradient
    is 0.  Elsewhere it is -r A.  With ``eps_clip_c`` c a row with A < 0 loses at most -c A (dual clip).
    Sums: ``clipped`` rows, ``ratio``, ``ppo_kl`` (old - new).
    Source: PPO, arXiv 1707.06347, equation 7; separate bounds from DAPO, arXiv 2503.14476; dual clip
    from arXiv 1912.09729, equation 5.
    """
    return clipped_surrogate(log_ratio(rows.log_probs, rows.old_log_probs).exp(), rows, algorithm)


def gspo(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """Clip as ``ppo`` with the ratio of the whole sample, the geometric mean of its rows' ratios.

    s = exp(mean over the sample of new - old), at most e^10.  A row's ratio is ``sg(s) exp(new - sg(new))``: its
    value is s, and its gradient is s times the gradient of the row's own log-prob.
    Source: GSPO, arXiv 2507.18071, section 4.3 (GSPO-token); usual bounds are 3e-4 and 4e-4.
    """
    mean = rows.sample_mean(rows.log_probs - rows.old_log_probs).clamp(max=_MAX_LOG_SAMPLE_RATIO)
    ratio = rows.spread_over_rows(mean.exp()) * (rows.log_probs - rows.log_probs.detach()).exp()
    return clipped_surrogate(ratio, rows, algorithm)


def clipped_surrogate(ratio: Tensor, rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """The clipped loss of ``ppo`` for any ratio float[n] with gradient."""
    unclipped = -ratio * rows.advantages
    bounds = 1.0 - algorithm.eps_clip, 1.0 + algorithm.clip_high
    bounded = -ratio.clamp(*bounds) * rows.advantages
    clipped = bounded.detach() > unclipped.detach()
    loss = torch.maximum(unclipped, bounded)
    if algorithm.eps_clip_c is not None:
        most = -algorithm.eps_clip_c * rows.advantages
        above = (rows.advantages < 0) & (loss.detach() > most)
        loss, clipped = torch.where(above, most, loss), clipped | above
    return RowLoss(loss=loss, sums=ratio_sums(ratio, clipped, rows))


def ratio_sums(ratio: Tensor, clipped: Tensor, rows: LossRows) -> dict[str, Tensor]:
    """Sums of every loss with a ratio: ``clipped`` rows, ``ratio``, ``ppo_kl`` (old - new)."""
    return {
        "clipped": (clipped & rows.mask).sum(),
        "ratio": zero_outside(ratio.detach(), rows.mask).sum(),
        "ppo_kl": (rows.old_log_probs - rows.log_probs.detach()).sum(),
    }

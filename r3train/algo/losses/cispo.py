"""CISPO: a clipped weight on REINFORCE."""

from __future__ import annotations

from r3train.algo.divergence import log_ratio
from r3train.algo.losses.ppo import ratio_sums
from r3train.algo.loss_rows import LossRows, RowLoss
from r3train.config.algorithm_settings import AlgorithmSection


def cispo(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """Take ``-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A new`` of each row, r = new / old.

    Every row keeps a gradient: the bounds hold the weight.  ``eps_clip`` of 1 or more means no lower
    bound.  ``clipped`` counts rows whose weight was held.
    Source: MiniMax-M1, arXiv 2506.13585, equation 4.
    """
    ratio = log_ratio(rows.log_probs, rows.old_log_probs).exp().detach()
    weight = ratio.clamp(max(1.0 - algorithm.eps_clip, 0.0), 1.0 + algorithm.clip_high)
    loss = -weight * rows.advantages * rows.log_probs
    return RowLoss(loss, sums=ratio_sums(ratio, weight != ratio, rows))

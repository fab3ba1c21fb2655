"""PPO's clipped surrogate."""

from __future__ import annotations

import torch

from r3train.algo.divergence import log_ratio, zero_outside
from r3train.algo.rows import LossRows, RowLoss
from r3train.config.algorithm import AlgorithmSection


def ppo(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    """Take ``-min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A)`` of each row, r = new / old.

    A row is clipped if r > 1 + eps_clip_high and A > 0, or r < 1 - eps_clip and A < 0; its gradient
    is 0.  Elsewhere it is -r A.
    Sums: ``clipped`` rows, ``ratio``, ``ppo_kl`` (old - new).
    Source: PPO, arXiv 1707.06347, equation 7; separate bounds from DAPO, arXiv 2503.14476.
    """
    ratio = log_ratio(rows.log_probs, rows.old_log_probs).exp()
    unclipped = -ratio * rows.advantages
    bounds = 1.0 - algorithm.eps_clip, 1.0 + algorithm.clip_high
    bounded = -ratio.clamp(*bounds) * rows.advantages
    clipped = bounded.detach() > unclipped.detach()
    return RowLoss(
        loss=torch.maximum(unclipped, bounded),
        sums={
            "clipped": (clipped & rows.mask).sum(),
            "ratio": zero_outside(ratio.detach(), rows.mask).sum(),
            "ppo_kl": (rows.old_log_probs - rows.log_probs.detach()).sum(),
        },
    )

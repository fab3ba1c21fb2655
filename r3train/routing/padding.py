"""Routes for slots that the rollout did not report, and for rows that are padding.

Each row is filled from its own complement set: the k-th missing slot takes the k-th
highest-scoring expert that the row does not use yet.  A row therefore never holds an expert twice
(duplicates break the experts' all-to-all, or train silently wrong), and memory stays at
rows x experts booleans.
"""

from __future__ import annotations

import numpy as np
import torch


def fill_missing(
    scores: torch.Tensor, experts: torch.Tensor, missing: torch.Tensor
) -> torch.Tensor:
    """Fill the missing slots of each row with the best experts the row does not use.

    scores: float[m, E], the router's own; experts: int64[m, K], anything in missing slots;
    missing: bool[m, K].  Returns int64[m, K] without duplicates in a row.  No device sync.
    """
    num_experts = scores.shape[1]
    # missing slots mark a column past the last expert, which is cut off again
    used = torch.zeros(scores.shape[0], num_experts + 1, dtype=torch.bool, device=scores.device)
    used.scatter_(1, experts.masked_fill(missing, num_experts), True)
    free_scores = scores.detach().masked_fill(used[:, :num_experts], float("-inf"))
    best = free_scores.topk(experts.shape[1], dim=1).indices
    nth_missing = (missing.long().cumsum(1) - 1).clamp_min(0)
    return torch.where(missing, best.gather(1, nth_missing), experts)


def padding_routes(num_rows: int, topk: int, num_experts: int) -> np.ndarray:
    """Routes of whole padding rows, dealt round the experts so that they pile up nowhere.

    Returns int64[num_rows, topk], distinct within a row.
    """
    return np.arange(num_rows * topk, dtype=np.int64).reshape(num_rows, topk) % num_experts

"""Agreement of the trainer's own top-k with the replayed one, and the level of chance."""

from __future__ import annotations

from math import comb

import torch


def overlap_counts(
    own: torch.Tensor, replayed: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count the rows in which two top-k choices are equal sets, share some experts, share none.

    own, replayed: int64[m, K], distinct within a row; counted: bool[m].
    Returns three int64 scalars on the device; they add up to counted.sum().
    """
    shared = (own[:, :, None] == replayed[:, None, :]).sum((1, 2))
    equal = ((shared == own.shape[1]) & counted).sum()
    none = ((shared == 0) & counted).sum()
    return equal, counted.sum() - equal - none, none


def chance_levels(num_experts: int, topk: int) -> dict[str, float]:
    """Shares of equal, overlapping and disjoint rows for two independent uniform choices."""
    total = comb(num_experts, topk)
    none = comb(num_experts - topk, topk) / total if num_experts >= 2 * topk else 0.0
    return {"equal": 1 / total, "overlap": 1 - 1 / total - none, "mismatch": none}

"""Agreement of the trainer's own top-k with the replayed one, and the level of chance."""

from __future__ import annotations

from math import comb

import torch


def shared_experts(own: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    """Count the experts that two top-k choices share in each row, int64[m].

    own, replayed: int64[m, K], distinct within a row.
    """
    return (own[:, :, None] == replayed[:, None, :]).sum((1, 2))


def overlap_counts(
    shared: torch.Tensor, topk: int, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count the rows in which two top-k choices are equal sets, share some experts, share none.

    shared: int64[m] of ``shared_experts``; counted: bool[m].
    Returns three int64 scalars on the device; they add up to counted.sum().
    """
    equal = ((shared == topk) & counted).sum()
    none = ((shared == 0) & counted).sum()
    return equal, counted.sum() - equal - none, none


def chance_levels(num_experts: int, topk: int) -> dict[str, float]:
    """Shares of equal, overlapping and disjoint rows for two independent uniform choices."""
    total = comb(num_experts, topk)
    none = comb(num_experts - topk, topk) / total if num_experts >= 2 * topk else 0.0
    return {"equal": 1 / total, "overlap": 1 - 1 / total - none, "mismatch": none}

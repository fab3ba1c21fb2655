"""Agreement of the trainer's own top-k with the replayed one, and the level of chance."""

from __future__ import annotations

from math import comb, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an audit of evidence needs ``chance_levels`` only
    import torch


def shared_experts(live: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    """Count the experts that two top-k choices share in each row, int64[..., m].

    live, replayed: int64[..., m, K], distinct within a row.
    """
    return (live[..., :, None] == replayed[..., None, :]).sum((-1, -2))


def overlap_counts(
    shared: torch.Tensor, topk: int, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count the rows in which two top-k choices are equal sets, share some experts, share none.

    shared: int64[..., m] of ``shared_experts``; counted: bool[..., m].
    Returns three times int64[...] on the device; they add up to counted.sum(-1).
    """
    equal = ((shared == topk) & counted).sum(-1)
    none = ((shared == 0) & counted).sum(-1)
    return equal, counted.sum(-1) - equal - none, none


def drift_of_layer(
    rows: float, rows_left: float, gate_mass: float, load: torch.Tensor
) -> dict[str, float]:
    """Describe the router's drift in one layer.

    rows, rows_left: rows, and those whose live top-k is not the replayed set; gate_mass: sum over
    rows of the gate mass on the replayed experts over that on the live top-k; load: float[E], rows
    that chose each expert live.  ``load_entropy`` is 1 for an even load and 0 for a single expert;
    ``dead_experts`` are those that no row chose.
    """
    share = load / load.sum()
    entropy = float(-share.xlogy(share).sum()) / log(len(load)) if len(load) > 1 else 1.0
    return {
        "left": rows_left / rows,
        "gate_mass": gate_mass / rows,
        "load_entropy": entropy,
        "dead_experts": float((load == 0).sum()),
    }


def chance_levels(num_experts: int, topk: int) -> dict[str, float]:
    """Shares of equal, overlapping and disjoint rows for two independent uniform choices."""
    total = comb(num_experts, topk)
    none = comb(num_experts - topk, topk) / total if num_experts >= 2 * topk else 0.0
    return {"equal": 1 / total, "overlap": 1 - 1 / total - none, "mismatch": none}

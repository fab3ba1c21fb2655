"""Reduction of the loss reports of all microbatches and ranks, in two small collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from r3train.algo.corrections import (
    NUM_GAP_BINS,
    gap_quantile,
    is_group_sum,
    mismatch_metrics,
)
from r3train.types import RankTopology


def reduce_metrics(
    reports: list[dict],
    topology: RankTopology,
    names: tuple[Sequence[str], Sequence[str]],
    device: torch.device,
) -> dict[str, float]:
    """Return means over the global loss tokens, maxima, and sums of rows by age and class; equal on all ranks.

    reports: {"sums": ..., "maxima": ..., "gaps": ...} for each microbatch on the last stage, none on
    other stages.  names: the names of the sums and of the maxima.
    Tensor-parallel rank 0 alone contributes: its peers hold the same tokens.
    """
    sum_names, maximum_names = names
    num_sums = len(sum_names)
    sums = torch.zeros(num_sums + NUM_GAP_BINS, dtype=torch.float64, device=device)
    maxima = torch.full((len(maximum_names),), -math.inf, dtype=torch.float64, device=device)
    if topology.tp_rank == 0:
        for report in reports:
            values = torch.stack([report["sums"][n].double() for n in sum_names])
            sums += torch.cat([values, report["gaps"].double()])
            found = torch.stack([report["maxima"][n].double() for n in maximum_names])
            maxima = torch.maximum(maxima, found)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    gaps = sums[num_sums:].tolist()
    totals = dict(zip(sum_names, sums.tolist()))  # without the bins of the gaps
    num_tokens = totals.pop("num_tokens")
    metrics = {
        name: total if is_group_sum(name) else total / max(num_tokens, 1.0)
        for name, total in totals.items()
    }
    metrics.update(zip(maximum_names, maxima.tolist()))
    metrics.update(mismatch_metrics(metrics))
    metrics["log_prob_gap_p999"] = gap_quantile(gaps, 0.999, metrics["log_prob_gap_max"])
    metrics["num_loss_tokens"] = num_tokens
    return metrics

"""Loss reports of all microbatches and ranks to one set of numbers, in two small collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from r3train.algo.corrections import NUM_GAP_BINS, gap_quantile
from r3train.trainer.megatron.forward_step import LossSettings
from r3train.types import RankTopology

_SUMS = (
    "num_tokens",
    "loss",
    "pg_loss",
    "clipped",
    "ratio",
    "ppo_kl",
    "entropy",
    "log_prob_gap_abs",
    "log_prob_gap_k3",
    "log_prob_gap_far",
)
_TIS_SUMS = ("tis_weight", "tis_ratio", "tis_clipped_high", "tis_clipped_low")
_MAXIMA = ("log_prob_gap_max",)


def reduce_metrics(
    reports: list[dict], topology: RankTopology, settings: LossSettings, device: torch.device
) -> dict[str, float]:
    """Means over the global loss tokens (maxima as they are), equal on all ranks.

    reports: one {"sums": ..., "maxima": ..., "gaps": ...} a microbatch on the last stage, none
    elsewhere.
    Only tensor-parallel rank 0 contributes: its peers hold the same tokens.
    """
    names = list(_SUMS)
    if settings.kl_loss_coef:
        names.append("kl")
    if settings.use_tis:
        names.extend(_TIS_SUMS)
    sums = torch.zeros(len(names) + NUM_GAP_BINS, dtype=torch.float64, device=device)
    maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)
    if topology.tp_rank == 0:
        for report in reports:
            values = torch.stack([report["sums"][n].double() for n in names])
            sums += torch.cat([values, report["gaps"].double()])
            found = torch.stack([report["maxima"][n].double() for n in _MAXIMA])
            maxima = torch.maximum(maxima, found)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    gaps = sums[len(names) :].tolist()
    totals = dict(zip(names, sums.tolist()))  # as many as there are names
    num_tokens = totals.pop("num_tokens")
    metrics = {name: total / max(num_tokens, 1.0) for name, total in totals.items()}
    metrics.update(zip(_MAXIMA, maxima.tolist()))
    metrics["log_prob_gap_p999"] = gap_quantile(gaps, 0.999, metrics["log_prob_gap_max"])
    metrics["num_loss_tokens"] = num_tokens
    return metrics

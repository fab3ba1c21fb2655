"""Measure how far the log-probs of engine and trainer differ, and correct for it.

All tensors are flat over the rows of a microbatch, n of them.  Nothing here reads a value back to
the host.  Metrics are sums (and maxima, keys ending in ``_max``), so that microbatches and ranks
can be added up before anyone divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from r3train.algo.divergence import k3_kl, log_ratio, zero_outside

# Bins of |gap|, 32 a decade from 1e-8 to 100 nats: a quantile is known to 7.5%.
_BINS_PER_DECADE, _LOWEST, _DECADES = 32, -8, 10
NUM_GAP_BINS = _BINS_PER_DECADE * _DECADES + 2  # and one below, one above

# A gap of ln 2: one side finds the token at least twice as likely as the other.
TWICE_AS_LIKELY = math.log(2.0)


def truncated_importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    clip: float,
    clip_low: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh each token by how likely the actor was to sample it, against how likely the engine was.

    old_log_probs (the actor's, before the update) and rollout_log_probs (the engine's): float[n],
    mask: bool[n].  Returns detached weights float[n], ``exp(old - rollout)`` held within
    [clip_low, clip] and 0 outside the mask, and the sums ``tis_weight``, ``tis_ratio`` (before
    the clip), ``tis_clipped_high`` and ``tis_clipped_low``.
    Raises ValueError unless 0 <= clip_low < clip.
    Source: truncated importance sampling between rollout engine and trainer, F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    if not 0.0 <= clip_low < clip:
        raise ValueError(
            f"tis_clip_low is {clip_low} and tis_clip {clip}, expected 0 <= low < clip"
        )
    old = zero_outside(old_log_probs.detach(), mask)
    rollout = zero_outside(rollout_log_probs.detach(), mask)
    ratio = log_ratio(old, rollout).exp()
    weights = zero_outside(ratio.clamp(clip_low, clip), mask)
    return weights, {
        "tis_weight": weights.sum(),
        "tis_ratio": zero_outside(ratio, mask).sum(),
        "tis_clipped_high": ((ratio > clip) & mask).sum(),
        "tis_clipped_low": ((ratio < clip_low) & mask).sum(),
    }


def log_prob_gap_sums(
    actor_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Sum up how far the actor's log-probs lie from the engine's, over the masked rows.

    Returns detached scalars: ``log_prob_gap_abs``, ``log_prob_gap_k3`` (an estimate of
    KL(engine || actor), for the engine sampled the tokens), ``log_prob_gap_far`` (rows with
    |gap| > ln 2), and ``log_prob_gap_max``, which is a maximum and not a sum.
    """
    actor = zero_outside(actor_log_probs.detach(), mask)
    rollout = zero_outside(rollout_log_probs.detach(), mask)
    gap = (actor - rollout).abs()
    return {
        "log_prob_gap_abs": gap.sum(),
        "log_prob_gap_k3": k3_kl(rollout, actor).sum(),
        "log_prob_gap_far": (gap > TWICE_AS_LIKELY).sum(),
        # a rank may hold no row at all, and an empty tensor has no maximum
        "log_prob_gap_max": gap.amax() if gap.numel() else gap.sum(),
    }


def log_prob_gap_stats(
    actor_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """The gap of one whole set of rows as means: the sums of ``log_prob_gap_sums``, divided.

    Returns detached scalars ``mean``, ``k3``, ``far_share`` and ``max``; 0 where no row is masked
    in.
    """
    sums = log_prob_gap_sums(actor_log_probs, rollout_log_probs, mask)
    rows = mask.sum().clamp(min=1)
    return {
        "mean": sums["log_prob_gap_abs"] / rows,
        "k3": sums["log_prob_gap_k3"] / rows,
        "far_share": sums["log_prob_gap_far"] / rows,
        "max": sums["log_prob_gap_max"],
    }


def log_prob_gap_histogram(
    actor_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> Tensor:
    """Count the masked rows in each bin of |gap|; counts of microbatches and ranks add up.

    Returns int64[NUM_GAP_BINS], detached.  A gap that is no number counts as the largest.
    """
    gap = (actor_log_probs.detach() - rollout_log_probs.detach()).abs()
    place = ((gap.double().log10() - _LOWEST) * _BINS_PER_DECADE).floor() + 1
    place = place.nan_to_num(nan=NUM_GAP_BINS - 1).clamp(0, NUM_GAP_BINS - 1).long()
    counts = torch.zeros(NUM_GAP_BINS, dtype=torch.int64, device=gap.device)
    # not bincount, which waits for the device
    return counts.scatter_add_(0, place, mask.long())


def gap_quantile(counts: Sequence[float], share: float, largest: float) -> float:
    """The |gap| that ``share`` of the rows stay at or below: a bin's upper edge, or ``largest``.

    counts: of ``log_prob_gap_histogram``; largest: the largest gap.  0 without rows.
    """
    wanted, seen = share * sum(counts), 0.0
    if not wanted:
        return 0.0
    for place, count in enumerate(counts[:-1]):
        seen += count
        if seen >= wanted:
            return min(10.0 ** (_LOWEST + place / _BINS_PER_DECADE), largest)
    return largest

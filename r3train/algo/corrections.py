"""Measure how far the log-probs of engine and trainer differ, and correct for it.

All tensors are flat over the rows of a microbatch, n of them; d = old - rollout, the actor's log-prob
before the update less the engine's.  Nothing here reads a value back to the host.  Metrics are sums
(and maxima, keys ending in ``_max``), so that microbatches and ranks can be added up before anyone
divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from r3train.algo.divergence import MAX_LOG_RATIO, k3_kl, log_ratio, zero_outside
from r3train.algo.loss_rows import LossRows
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RowClass

# Bins of |gap|, 32 a decade from 1e-8 to 100 nats: a quantile is known to 7.5%.
_BINS_PER_DECADE, _LOWEST, _DECADES = 32, -8, 10
NUM_GAP_BINS = _BINS_PER_DECADE * _DECADES + 2  # and one below, one above

# A gap of ln 2: one side finds the token at least twice as likely as the other.
TWICE_AS_LIKELY = math.log(2.0)


def rollout_weights(
    rows: LossRows, algorithm: AlgorithmSection
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
    """Weigh each row by how likely the actor was to sample it, against how likely the engine was.

    ``rollout_is`` says whose likelihood: of the token, exp(d); of the whole sample, exp(sum of d); or
    the sample's geometric mean, exp(mean of d).  ``truncate`` holds the weight within [tis_clip_low,
    tis_clip], ``mask`` makes it 0 outside.
    Returns three things:

    - the weights float[n], detached and 0 outside the mask; None without ``rollout_is``
    - the rows beyond the bounds, bool[n], by the names of their sums; {} without ``rollout_is``
    - sums: ``is_ratio`` and ``is_ratio_square`` of the ratio before the bounds (the token's, without
      ``rollout_is``); with ``rollout_is`` also ``tis_weight``, ``tis_ratio``, ``tis_clipped_high`` and
      ``tis_clipped_low``

    Source: truncated importance sampling between rollout engine and trainer, F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); masks are IcePop's.
    """
    kind = algorithm.importance_level
    d = log_ratio(rows.old_log_probs, rows.rollout_log_probs)
    if kind == "sequence":
        d = rows.spread_over_rows(rows.sample_sum(d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    elif kind == "geometric":
        d = rows.spread_over_rows(rows.sample_mean(d))
    ratio = zero_outside(d.exp(), rows.mask)
    sums = {"is_ratio": ratio.sum(), "is_ratio_square": ratio.square().sum()}
    if kind == "none":
        return None, {}, sums
    low, high = algorithm.tis_clip_low, algorithm.tis_clip
    above, below = ratio > high, (ratio < low) & rows.mask
    if algorithm.rollout_is_mode == "mask":
        weights = ratio.masked_fill(above | below, 0.0)
    else:
        weights = zero_outside(ratio.clamp(low, high), rows.mask)
    beyond = {"tis_clipped_high": above, "tis_clipped_low": below}
    sums |= {"tis_weight": weights.sum(), "tis_ratio": sums["is_ratio"]}
    return weights, beyond, sums | {name: rows.sum() for name, rows in beyond.items()}


def kept_rows(rows: LossRows, algorithm: AlgorithmSection) -> tuple[Tensor | None, dict]:
    """Decide the rows whose policy loss counts: those that ``rollout_rs`` and ``opsm_delta`` both keep.

    Each name in ``rollout_rs`` is LEVEL_ESTIMATE.  The estimates of a row, with d as above, are
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.  Levels: the token's own; the sample's sum, mean or
    largest.  exp(k1) must lie within its two bounds; k2 and k3 must not exceed theirs.
    ``opsm_delta``: a row with A < 0 is dropped if the mean over its sample of old - new exceeds it.
    Returns bool[n] (None if neither is set) and the sums ``rs_rejected``, ``opsm_dropped`` of rows.
    Source: verl's rejection masks of these names; off-policy sequence masking of DeepSeek-V3.2.
    """
    keep: Tensor | None = None
    sums: dict[str, Tensor] = {}
    if algorithm.rollout_rs:
        keep = torch.ones_like(rows.mask)
        d = log_ratio(rows.old_log_probs, rows.rollout_log_probs)
        for name, (low, high) in algorithm.rejection_bounds.items():
            level, _, estimate = name.rpartition("_")
            value = {"k1": -d, "k2": d.square() / 2, "k3": k3_kl(-d, torch.zeros_like(d))}[estimate]
            if level != "token":
                reduced = {
                    "seq_sum": rows.sample_sum,
                    "seq_mean": rows.sample_mean,
                    "seq_max": rows.sample_max,
                }[level](value)
                value = rows.spread_over_rows(reduced)
            keep &= (value >= low) & (value <= high)
        sums["rs_rejected"] = (~keep & rows.mask).sum()
    if algorithm.opsm_delta is not None:
        moved = rows.spread_over_rows(rows.sample_mean(rows.old_log_probs - rows.log_probs))
        dropped = (rows.advantages < 0) & (moved > algorithm.opsm_delta)
        sums["opsm_dropped"] = (dropped & rows.mask).sum()
        keep = ~dropped if keep is None else keep & ~dropped
    return keep, sums


def mismatch_sums(rows: LossRows) -> dict[str, Tensor]:
    """Sums from which ``mismatch_metrics`` makes the metrics of the engine's gap.

    A sample's own numbers are spread over its loss rows.  So each sample counts once, on however many
    ranks its rows are.
    """
    d = log_ratio(rows.old_log_probs, rows.rollout_log_probs)
    return {
        "log_prob_gap_k1": -d.sum(),
        "chi2_token": zero_outside(torch.expm1(2 * d), rows.mask).sum(),
        **{name: sums[0] for name, sums in _sample_sums(rows, d, rows.mask[None]).items()},
    }


def _sample_sums(rows: LossRows, d: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Sum metrics of samples by each of k masks: a sample is measured by its rows in the mask.

    counted: the masks, bool[k, n].  Returns float[k] by name.
    """
    counted = (counted & rows.mask).to(d.dtype)
    ones = torch.ones_like(d)
    streams = torch.stack([ones, d, rows.old_log_probs, rows.rollout_log_probs])
    sums = rows.sample_sum(streams[:, None] * counted)  # [4, k, B]
    count = sums[0].clamp(min=1)
    share = counted / count[:, rows.samples]
    values_by_name = {
        "sequences": torch.ones_like(count),
        "seq_chi2": torch.expm1((2 * sums[1]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
        "seq_ppl_actor": (-sums[2] / count).clamp(max=MAX_LOG_RATIO).exp(),
        "seq_ppl_rollout": (-sums[3] / count).clamp(max=MAX_LOG_RATIO).exp(),
    }
    return {n: (value[:, rows.samples] * share).sum(-1) for n, value in values_by_name.items()}


def mismatch_metrics(means: dict[str, float]) -> dict[str, float]:
    """Turn means over tokens of the sums above into metrics; the helpers among them are taken out.

    ``ess``: the effective share of the samples, mean(w)^2 / mean(w^2) of the importance ratios;
    ``chi2_token`` mean(w^2) - 1 of tokens, ``chi2_seq`` of whole samples; ``ppl_actor``,
    ``ppl_rollout``: mean over samples of exp(-mean log-prob), and their ratio.
    """
    sequences = means.pop("sequences") or 1.0
    actor, rollout = means.pop("seq_ppl_actor"), means.pop("seq_ppl_rollout")
    ratio, square = means.pop("is_ratio"), means.pop("is_ratio_square")
    return {
        "ess": ratio**2 / square if square else 0.0,
        "chi2_seq": means.pop("seq_chi2") / sequences,
        "ppl_actor": actor / sequences,
        "ppl_rollout": rollout / sequences,
        "ppl_ratio": actor / rollout if rollout else 0.0,
    }


# the sums of rows of one age: NAME_age_AGE, and of one class: NAME_rows_CLASS
_AGE, _CLASS = "_age_", "_rows_"
_CLASS_SUMS = ("loss_tokens", "log_prob_gap_mean", "log_prob_gap_k1", "log_prob_gap_k3")
_LABELS = {row_class.label for row_class in RowClass}
_AGE_SUMS = (
    *_CLASS_SUMS,
    "ess",
    "chi2_token",
    "tis_weight",
    "tis_clipped_high",
    "tis_clipped_low",
    "dropped_share",
)
# sums over samples: each sample is measured by its rows of that age
_SAMPLE_SUMS = ("sequences", "seq_chi2", "seq_ppl_actor", "seq_ppl_rollout")


def age_sums(
    rows: LossRows, correction: Tensor | None, beyond: dict[str, Tensor], keep: Tensor | None
) -> dict[str, Tensor]:
    """Sums from which ``group_metrics`` makes the gap's metrics by age of the weights.

    correction, beyond, keep: as ``rollout_weights`` and ``kept_rows`` return them.  {} where all rows are
    of one age.
    """
    if rows.num_ages < 2 or rows.ages is None:
        return {}
    d = log_ratio(rows.old_log_probs, rows.rollout_log_probs)
    ratio = zero_outside(d.exp(), rows.mask)
    row_values = _gaps(rows, d) | {"ess": ratio, "chi2_token": ratio.square()}
    if correction is not None:
        row_values |= {"tis_weight": correction, **{n: b.float() for n, b in beyond.items()}}
    if keep is not None:
        row_values["dropped_share"] = (~keep & rows.mask).float()
    table = torch.stack(list(row_values.values())).float()
    sums = table.new_zeros(len(row_values), rows.num_ages).index_add_(1, rows.ages, table)
    ages = torch.arange(rows.num_ages, device=d.device)
    sums_by_name = dict(zip(row_values, sums)) | _sample_sums(rows, d, rows.ages == ages[:, None])
    return {
        f"{name}{_AGE}{age}": values[age]
        for name, values in sums_by_name.items()
        for age in range(rows.num_ages)
    }


def _gaps(rows: LossRows, d: Tensor) -> dict[str, Tensor]:
    """Make the values of each row that are summed by age and class, from its d: float[n] by name."""
    # the k3 of rounding alone is half its square, which float32 would lose
    wide = d.double()
    values = (rows.mask.float(), d.abs(), -d, k3_kl(-wide, torch.zeros_like(wide)))
    return dict(zip(_CLASS_SUMS, values, strict=True))


def class_sums(rows: LossRows) -> dict[str, Tensor]:
    """Sums from which ``group_metrics`` makes the gap's metrics by class of the row that predicted a token.

    No server takes the row that predicts a sampled token from its cache, so the class ``cached`` has the
    tokens of the samples in which an earlier row came from there.  {} without R3.
    """
    if rows.row_classes is None:
        return {}
    d = log_ratio(rows.old_log_probs, rows.rollout_log_probs)
    classes = torch.arange(len(RowClass), device=d.device)
    class_masks = rows.row_classes == classes[:, None]  # [classes, n]
    # all rows, of the prompt too: not ``sample_max``, which takes masked rows
    cached = d.new_zeros(rows.loss_weights.shape[0])
    is_cached = class_masks[RowClass.CACHED].to(d.dtype)
    cached = rows.over_ranks(cached.scatter_reduce_(0, rows.samples, is_cached, "amax"), "max")
    behind = rows.spread_over_rows(cached) > 0
    class_masks = torch.where((classes == RowClass.CACHED)[:, None], behind, class_masks)
    table = torch.stack(list(_gaps(rows, d).values())).float()
    sums = table @ class_masks.float().T
    return {
        f"{name}{_CLASS}{row_class.label}": values[row_class]
        for name, values in zip(_CLASS_SUMS, sums)
        for row_class in RowClass
    }


def is_group_sum(name: str) -> bool:
    """Return True for a sum of one age or class: it is divided by its own count, not by the step's loss tokens."""
    kind, _, age = name.partition(_AGE)
    if kind in (*_AGE_SUMS, *_SAMPLE_SUMS) and age.isdecimal():
        return True
    kind, _, label = name.partition(_CLASS)
    return kind in _CLASS_SUMS and label in _LABELS


def group_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Turn the sums over a rollout into means over the rows of each age and class; one without rows has none.

    ``loss_tokens_age_N`` stays the number of rows that weights N rollouts behind sampled; the last age holds those
    of older weights too; ``loss_tokens_rows_CLASS`` that of a class.  In metrics of samples (``chi2_seq``, ``ppl_*``) a sample counts by its rows of that age.
    """
    out: dict[str, float] = {}
    for name, value in sums.items():
        sign = _AGE if _AGE in name else _CLASS
        kind, _, group = name.partition(sign)
        count = sums[f"loss_tokens{sign}{group}"]
        if count and kind in _AGE_SUMS:
            out[name] = value if kind == "loss_tokens" else value / count
    for age in [name.partition(_AGE)[2] for name in out if name.startswith("ess")]:
        mean, square = out[f"ess{_AGE}{age}"], out[f"chi2_token{_AGE}{age}"]
        out |= {f"ess{_AGE}{age}": mean**2 / square, f"chi2_token{_AGE}{age}": square - 1}
        samples, chi2, actor, rollout = (sums[f"{name}{_AGE}{age}"] for name in _SAMPLE_SUMS)
        out |= {
            f"chi2_seq{_AGE}{age}": chi2 / samples,
            f"ppl_actor{_AGE}{age}": actor / samples,
            f"ppl_rollout{_AGE}{age}": rollout / samples,
            f"ppl_ratio{_AGE}{age}": actor / rollout if rollout else 0.0,
        }
    return out


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
        # of rounding it is the square, which float32 would lose
        "log_prob_gap_k3": k3_kl(rollout.double(), actor.double()).sum(),
        "log_prob_gap_far": (gap > TWICE_AS_LIKELY).sum(),
        # a rank may hold no row at all, and an empty tensor has no maximum
        "log_prob_gap_max": gap.amax() if gap.numel() else gap.sum(),
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

"""The gap between server and actor as a budget: how much of it each cause made, at every step.

A token's gap d is the actor's log-prob less the server's.  Between the two stand other scores of the
same tokens by the same policy:

    server     as it was sampled -> as the same server computes it again
    kernels    the server -> the actor at equal weights, with the server's experts replayed
    routing    the actor with the server's experts -> with those that its routers choose; replay removes it
    cache      the server on a cached prefix -> without one
    staleness  tokens of older weights -> tokens of the actor's own
    rest       what is left

Rechecks give the first, canaries the next three, and the step's own metrics by age staleness.  Nothing needs another
pass over the batch.

A part is measured by its k1, k3 and mean |d|.  k1 adds up along the chain.  k3 is half the mean square of a
small d: it adds up for causes that are independent of each other, and is what shares are made of.  Neighbours in the
chain are not quite: both have the rounding of the scores between them, with opposite signs, and where rounding is all
there is they add up to more than the gap.  So much is taken off them (``_without_shared``).  Means of |d| do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PARTS = ("server", "kernels", "routing", "cache", "staleness", "rest")
ADDED = ("k1", "k3")
_READ = (*ADDED, "mean")
_TOTAL, _AGE = "train/log_prob_gap_", "_age_"


@dataclass(frozen=True, slots=True)
class CanaryLogProbs:
    """Log-probs of the canary texts at one weight version, scored by servers and actor: float[N] of the same tokens.

    server: without a cached token; actor: with the server's experts replayed; live: without replay.
    early, warm: of the texts' later halves, on an empty cache and on the cached first half.  None is not measured.
    """

    server: np.ndarray
    actor: np.ndarray
    live: np.ndarray | None = None
    early: np.ndarray | None = None
    warm: np.ndarray | None = None


Gap = dict[str, float]


def gap_stats(before: np.ndarray, after: np.ndarray) -> Gap:
    """Measure d = after - before of some tokens: k1, k3, mean and p999."""
    d = after.astype(np.float64) - before
    return {
        "k1": float(-d.mean()),
        "k3": float((np.expm1(d) - d).mean()),
        "mean": float(np.abs(d).mean()),
        "p999": float(np.quantile(np.abs(d), 0.999)),
    }


def gap_budget(
    metrics: Mapping[str, Any],
    *,
    rechecked: tuple[np.ndarray, np.ndarray] | None = None,
    canaries: CanaryLogProbs | None = None,
    replayed: bool,
    flushed: bool,
) -> dict[str, float]:
    """Split a step's gap: ``gap/PART_k1`` and ``_k3``, and ``_mean`` and ``_p999`` of what was read; {} without a gap.

    metrics: the step's; rechecked: log-probs as they were delivered and as their servers computed them again,
    float[N] each; replayed: with R3, which takes ``routing`` out of the gap; flushed: an update empties the servers' caches.

    Where it does not, canaries have cache keys of their own for each version and show nothing: ``cache`` is then what
    the step's tokens behind a cached prefix have more than equal weights explain, as far as there is a rest.

    Staleness is what tokens of older weights have more than others: than canaries and rechecks tell of equal
    weights, or without canaries than the step's own tokens of age 0.  Without either it is what rechecks leave.
    """
    if f"{_TOTAL}k3" not in metrics:
        return {}
    tokens = {
        int(key.rpartition(_AGE)[2]): count
        for key, count in metrics.items()
        if key.startswith(f"train/loss_tokens{_AGE}") and count
    }
    gaps_by_age = {a: {s: metrics[f"{_TOTAL}{s}{_AGE}{a}"] for s in ADDED} for a in tokens}
    total = {stat: metrics[f"{_TOTAL}{stat}"] for stat in ADDED}
    youngest = gaps_by_age[min(gaps_by_age)] if gaps_by_age else total
    parts = _measured(rechecked, canaries)
    outside = {"routing": parts.pop("routing")} if replayed and "routing" in parts else {}
    parts = _without_shared(parts, youngest["k3"])
    cached = metrics.get("train/loss_tokens_rows_cached", 0)
    cached /= max(metrics.get("train/num_loss_tokens", 0), 1)
    if "cache" in parts:  # of the step's tokens only those behind a cached prefix have it
        parts["cache"] |= {stat: cached * parts["cache"][stat] for stat in ADDED}
    base = {stat: sum(gap[stat] for gap in parts.values()) for stat in ADDED}
    fresh = gaps_by_age[0] if canaries is None and 0 in gaps_by_age else base
    older = {age: count / sum(tokens.values()) for age, count in tokens.items() if age > 0}
    parts["staleness"] = {
        stat: sum(share * (gaps_by_age[age][stat] - fresh[stat]) for age, share in older.items())
        for stat in ADDED
    }
    parts["rest"] = {s: total[s] - base[s] - parts["staleness"][s] for s in ADDED}
    behind = "train/log_prob_gap_{}_rows_cached"
    if not flushed and behind.format("k3") in metrics:
        more = {stat: cached * (metrics[behind.format(stat)] - base[stat]) for stat in ADDED}
        cache, rest = parts.setdefault("cache", dict.fromkeys(ADDED, 0.0)), parts["rest"]
        part = min(max(rest["k3"] / more["k3"], 0.0), 1.0) if more["k3"] > 0 else 0.0
        for stat in ADDED:
            cache[stat] += part * more[stat]
            rest[stat] -= part * more[stat]
    return {
        f"gap/{name}_{stat}": gap[stat] for name, gap in (parts | outside).items() for stat in gap
    }


def _without_shared(parts: dict[str, Gap], most: float) -> dict[str, Gap]:
    """Take off the rounding of a server's prefill, which server and kernels both have, and the gap has not.

    The cache's two scores are both of a prefill: half of their k3, but not more than the others hold, is that of one.
    The rest of it shows where server and kernels add up to more than the k3 of the gap at equal weights, ``most``.
    """
    parts = {name: dict(gap) for name, gap in parts.items()}
    prefills = [parts[name] for name in ("server", "kernels") if name in parts]
    cache = parts.get("cache")
    if len(prefills) == 2:
        room = min(gap["k3"] for gap in prefills)
        shared = 0.0
        if cache is not None:
            shared = min(cache["k3"] / 2, room)
            cache["k3"] -= 2 * shared
        over = sum(gap["k3"] for gap in prefills) - 2 * shared - most
        shared = min(max(shared, shared + over / 2), room)
        for gap in prefills:
            gap["k3"] -= shared
    return parts


def _measured(
    rechecked: tuple[np.ndarray, np.ndarray] | None,
    canaries: CanaryLogProbs | None,
) -> dict[str, Gap]:
    """Return the parts that are measured on other tokens than the step's."""
    parts: dict[str, Gap] = {}
    if rechecked is not None and len(rechecked[0]):
        parts["server"] = gap_stats(*rechecked)
    if canaries is None:
        return parts
    kernels = parts["kernels"] = gap_stats(canaries.server, canaries.actor)
    if canaries.live is not None:
        live = gap_stats(canaries.server, canaries.live)
        parts["routing"] = {stat: live[stat] - kernels[stat] for stat in _READ}
    if canaries.early is not None and canaries.warm is not None:
        parts["cache"] = gap_stats(canaries.warm, canaries.early)
    return parts

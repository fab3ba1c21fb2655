"""The gap between server and actor as a budget: how much of it each cause made, at every step.

A token's gap d is the actor's log-prob less the server's.  Between the two stand other readings of the same policy:

    server     as it was sampled -> as the same server computes it again
    kernels    the server -> the actor at equal weights, with the server's experts replayed
    routing    the actor with the server's experts -> with those of its own routers; replay removes it
    cache      the server on a cached prefix -> without one
    sampling   a text that was given -> a token that was drawn
    staleness  tokens of older weights -> tokens of the actor's own
    rest       what is left

Rechecks give the first, canaries the next four, and the step's own metrics by age staleness.  Nothing needs another
pass over the batch.

A part is measured by its k1, k3 and mean |d|.  k1 adds up along the chain.  k3 is half the mean square of a
small d: it adds up for causes that are independent of each other, and is what shares are made of.  Means of |d| do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PARTS = ("server", "kernels", "routing", "cache", "sampling", "staleness", "rest")
ADDED = ("k1", "k3", "mean")
_TOTAL, _AGE = "train/log_prob_gap_", "_age_"


@dataclass(frozen=True, slots=True)
class CanaryLogProbs:
    """Log-probs of fixed texts at one weight version, as servers and actor read them: float[N] of the same tokens.

    server: without a cached token; actor: with the server's experts replayed; live: by its own routers.
    early, warm: of the texts' later halves, on an empty cache and on the cached first half.
    drawn, drawn_actor: tokens that the server drew after the texts at the run's temperature, and as the actor
    reads them at that temperature.  None is not measured.
    """

    server: np.ndarray
    actor: np.ndarray
    live: np.ndarray | None = None
    early: np.ndarray | None = None
    warm: np.ndarray | None = None
    drawn: np.ndarray | None = None
    drawn_actor: np.ndarray | None = None


Gap = dict[str, float]


def gap_of(before: np.ndarray, after: np.ndarray) -> Gap:
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
    replayed: bool = True,
) -> dict[str, float]:
    """Split a step's gap: ``gap/PART_k1``, ``_k3``, ``_mean``, and ``_p999`` of what was measured; {} without a gap.

    metrics: the step's; rechecked: log-probs as they were delivered and as their servers computed them again,
    float[N] each; replayed: with R3, which takes ``routing`` out of the gap.

    Staleness is what tokens of older weights have more than others: than canaries and rechecks tell of equal
    weights, or without canaries than the step's own tokens of age 0.  Without either it is what rechecks leave.
    """
    if f"{_TOTAL}k3" not in metrics:
        return {}
    parts = _measured(metrics, rechecked, canaries)
    in_gap = [gap for name, gap in parts.items() if name != "routing" or not replayed]
    base = {stat: sum(gap[stat] for gap in in_gap) for stat in ADDED}
    tokens = {
        int(key.rpartition(_AGE)[2]): count
        for key, count in metrics.items()
        if key.startswith(f"train/loss_tokens{_AGE}")
    }
    fresh = base
    if canaries is None and tokens.get(0):
        fresh = {stat: metrics[f"{_TOTAL}{stat}{_AGE}0"] for stat in ADDED}
    older = {age: count / sum(tokens.values()) for age, count in tokens.items() if age > 0}
    parts["staleness"] = {
        stat: sum(
            share * (metrics[f"{_TOTAL}{stat}{_AGE}{age}"] - fresh[stat])
            for age, share in older.items()
        )
        for stat in ADDED
    }
    parts["rest"] = {
        stat: metrics[f"{_TOTAL}{stat}"] - base[stat] - parts["staleness"][stat] for stat in ADDED
    }
    return {f"gap/{name}_{stat}": gap[stat] for name, gap in parts.items() for stat in gap}


def _measured(
    metrics: Mapping[str, Any],
    rechecked: tuple[np.ndarray, np.ndarray] | None,
    canaries: CanaryLogProbs | None,
) -> dict[str, Gap]:
    """The parts that were read apart from the step's tokens."""
    parts: dict[str, Gap] = {}
    if rechecked is not None and len(rechecked[0]):
        parts["server"] = gap_of(*rechecked)
    if canaries is None:
        return parts
    kernels = parts["kernels"] = gap_of(canaries.server, canaries.actor)
    if canaries.live is not None:
        parts["routing"] = _less(gap_of(canaries.server, canaries.live), kernels)
    if canaries.early is not None and canaries.warm is not None:
        # of the step's tokens only those behind a cached prefix have it
        cached = metrics.get("train/loss_tokens_rows_cached", 0)
        share = cached / max(metrics["train/num_loss_tokens"], 1)
        gap = gap_of(canaries.warm, canaries.early)
        parts["cache"] = {**{stat: share * gap[stat] for stat in ADDED}, "p999": gap["p999"]}
    if canaries.drawn is not None and canaries.drawn_actor is not None:
        parts["sampling"] = _less(gap_of(canaries.drawn, canaries.drawn_actor), kernels)
    return parts


def _less(gap: Gap, other: Gap) -> Gap:
    return {stat: gap[stat] - other[stat] for stat in ADDED}

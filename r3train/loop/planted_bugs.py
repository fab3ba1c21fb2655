"""Deliberate bugs by name (--plant-bug, --plant-fault), so that people can see what comes of them.

Those of --plant-bug corrupt routes after the rollout side has taken their fingerprint, as a real
defect between the engine's bytes and the router would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from r3train.types import TrainSample, missing_marker

ROUTE_BUGS = ("one_expert", "token_shift", "layer_swap")


def plant(
    name: str, samples: Sequence[TrainSample], moe_layers: Sequence[int]
) -> list[TrainSample]:
    """Samples with the named bug in their routes; ``bypass`` is planted on the actor instead."""
    if name == "one_expert":  # a single expert id, in a single row of a single layer
        return [_with_routes(samples[0], _one_expert(samples[0], moe_layers[0])), *samples[1:]]
    if name == "token_shift":
        return [_with_routes(s, np.roll(s.sample.routed_experts, 1, axis=0)) for s in samples]
    if name == "layer_swap":
        a, b = moe_layers[0] - 1, moe_layers[1] - 1
        return [_with_routes(s, _swapped(s.sample.routed_experts, a, b)) for s in samples]
    return list(samples)


@dataclass(frozen=True)
class Poison:
    """``value`` (NaN, infinity) as advantages, as a broken reward or kernel would leave it."""

    value: float
    rollouts: range

    def plant(self, rollout_id: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The samples of a rollout, the first one spoiled where it is to be."""
        if rollout_id not in self.rollouts:
            return list(samples)
        first = samples[0]
        spoiled = np.where(first.sample.loss_mask, np.float32(self.value), first.advantages)
        return [replace(first, advantages=spoiled), *samples[1:]]


POISONS = {
    "nan_once": Poison(math.nan, range(1, 2)),
    "nan_always": Poison(math.nan, range(1, 1 << 62)),
    "inf_once": Poison(math.inf, range(1, 2)),
}


def _with_routes(s: TrainSample, routes: np.ndarray) -> TrainSample:
    return replace(s, sample=replace(s.sample, routed_experts=routes))


def _one_expert(s: TrainSample, layer: int) -> np.ndarray:
    routes = s.sample.routed_experts.copy()
    row = routes[routes.shape[0] // 2, layer - 1]
    taken = set(row.tolist()) - {missing_marker(routes.dtype)}
    row[0] = next(e for e in range(len(taken) + 1) if e not in taken)
    return routes


def _swapped(routes: np.ndarray, a: int, b: int) -> np.ndarray:
    out = routes.copy()
    out[:, [a, b]] = routes[:, [b, a]]
    return out

"""Deliberate bugs by name (--plant-bug, --plant-fault), so that people can see what comes of them.

Those of --plant-bug corrupt routes after the rollout side has taken their fingerprint, as a real
defect between the engine's bytes and the router would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.types import RouteRef, TrainSample, missing_marker

ROUTE_BUGS = ("one_expert", "token_shift", "layer_swap")


def planted_bugs(
    config: RunConfig, hf: HfModelFacts
) -> Callable[[int, Sequence[TrainSample]], list[TrainSample]] | None:
    """The function (rollout id, samples) -> samples that plants the bugs asked for, or None."""
    bug = config.replay.plant_bug if config.replay.plant_bug in ROUTE_BUGS else None
    poison = POISONS.get(config.faults.plant_fault)
    if bug is None and poison is None:
        return None

    def plant(rollout_id: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
        if bug is not None:
            samples = plant_in_routes(bug, _with_bytes(samples), hf.moe_layer_numbers)
        return list(samples) if poison is None else poison.plant(rollout_id, samples)

    return plant


def plant_in_routes(
    name: str, samples: Sequence[TrainSample], moe_layers: Sequence[int]
) -> list[TrainSample]:
    """Samples with the named bug in their routes."""
    if name == "one_expert":  # a single expert id, in a single row of a single layer
        return [_with_routes(samples[0], _one_expert(samples[0], moe_layers[0])), *samples[1:]]
    if name == "token_shift":
        return [_with_routes(s, np.roll(s.sample.routed_experts, 1, axis=0)) for s in samples]
    assert name == "layer_swap", name
    a, b = moe_layers[0] - 1, moe_layers[1] - 1
    return [_with_routes(s, _swapped(s.sample.routed_experts, a, b)) for s in samples]


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


def _with_bytes(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples with their routes here; brings them over where they are references."""
    return [
        (
            replace(s, sample=replace(s.sample, routed_experts=s.sample.routed_experts.read()))
            if isinstance(s.sample.routed_experts, RouteRef)
            else s
        )
        for s in samples
    ]

"""What the training loop is given: protocols of its parts, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from r3train.config.algorithm import AlgorithmSection
from r3train.loop.planted_bugs import Poison
from r3train.types import RouteShape, Scored


class RolloutSource(Protocol):
    """Where complete groups come from; ``rollout.producer.Producer`` is the one implementation."""

    def next_batch(self, step: int, on_wait: Callable | None = None) -> list[list[Scored]]: ...

    def quiesced(self) -> AbstractContextManager[None]: ...

    def set_version(self, version: int) -> None: ...

    def snapshot(self) -> Any: ...

    def stats(self) -> dict[str, Any]: ...

    @property
    def failure(self) -> BaseException | None: ...


class Display(Protocol):
    """What a person watches on rank 0."""

    def rollout_begin(self, rollout_id: int, num_groups: int) -> None: ...

    def rollout_update(self, groups_done: int, tokens: int) -> None: ...

    def train_update(self, activity: str) -> None: ...

    def step_line(self, metrics: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class ReplayPlan:
    """R3 as the loop needs it; None in its place trains without replay."""

    num_layers: int
    num_experts: int
    topk: int
    moe_layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    mismatch_threshold: float
    check: bool
    plant_bug: str | None

    @property
    def route_shape(self) -> RouteShape:
        """The size of one token's routes."""
        return RouteShape(self.num_layers, self.topk, self.num_experts)


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of the loop."""

    num_rollout: int
    start_rollout: int
    rollout_batch_size: int
    steps_per_rollout: int
    max_tokens_per_gpu: int
    algorithm: AlgorithmSection
    needs_reference: bool
    ci_test: bool
    probe_tokens: np.ndarray | None  # int32[T], under --check-weight-update-equal
    probe_tolerance: float
    publish_at_start: bool  # the servers do not hold the actor's first weights, or may not
    has_engines: bool  # False when dumped rollouts are replayed: there is nobody to publish to
    poison: Poison | None  # --plant-fault


@dataclass
class RankZero:
    """What rank 0 holds and other ranks do not."""

    start_source: Callable[[], RolloutSource]  # begins to generate
    publisher: Any  # weights.publish.WeightPublisher, None without engines
    probe: Callable[[np.ndarray], list[np.ndarray]]  # log-probs of one text on each server
    display: Display
    metrics: Any  # evidence.metrics.MetricsWriter
    route_wire_bytes: Callable[[], int] = lambda: 0  # base64 routes that its client received so far

"""Interfaces of the parts that the loop uses: a source of rollouts, and rank 0's own parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from r3train.engine.publish import WeightPublisher
from r3train.hf_checkpoint import NamedTensors
from r3train.loop.evaluation import Evaluations
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter
from r3train.types import RescoredRollout, Scored


class RolloutSource(Protocol):
    """Complete groups for training: a producer that generates them, or a reader of dumped ones."""

    def next_batch(
        self, rollout_id: int, on_wait: Callable | None = None
    ) -> list[list[Scored]]: ...

    def quiesced(self) -> AbstractContextManager[None]: ...

    def set_version(self, version: int) -> None: ...

    def put_back(self) -> None: ...  # the last batch, which was not trained

    def snapshot(self) -> Any: ...

    def rescored(self) -> RescoredRollout | None: ...

    def stats(self) -> dict[str, Any]: ...

    @property
    def failure(self) -> BaseException | None: ...


class RolloutSide(Protocol):
    """The servers of a run, or with --replay-rollouts the files in their place; on rank 0 alone."""

    @property
    def publisher(self) -> WeightPublisher | None: ...  # None if there are no servers

    def start_producer(self) -> RolloutSource: ...

    def hold_weights(self, weights: NamedTensors, version: int) -> Path: ...

    def probe(self, token_ids: np.ndarray) -> list[np.ndarray]: ...

    def stale_tokens(self, token_ids: np.ndarray) -> int: ...

    def route_wire_bytes(self) -> int: ...

    def hold_memory(self, *kinds: str) -> None: ...

    def stop_servers(self) -> None: ...

    def restart(self) -> None: ...

    def restored(self, version: int) -> None: ...

    def fault_counts(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class RankZero:
    """The parts that rank 0 holds and other ranks do not."""

    engines: RolloutSide
    display: RunDisplay
    metrics: MetricsWriter
    evaluations: Evaluations

    def next_groups(
        self, source: RolloutSource, rollout_id: int, batch_size: int
    ) -> list[list[Scored]]:
        """Wait for a rollout of ``batch_size`` groups and show its progress."""
        display = self.display
        display.rollout_begin(rollout_id, batch_size)
        display.train_update("waiting for rollout")
        first = source.stats()

        def show(groups_done: int, stats: dict[str, Any]) -> None:
            # of this wait alone: what was generated before it took none of its seconds
            tokens = stats["generated_tokens"] - first["generated_tokens"]
            display.rollout_update(min(groups_done, batch_size), tokens)

        groups = source.next_batch(rollout_id, lambda stats: show(stats["buffered_groups"], stats))
        show(len(groups), source.stats())
        return groups

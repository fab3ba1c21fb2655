"""The parts that rank 0 has in the loop: servers, their weights, what they generate, the display, the files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from r3train.loop.rollout_source import RolloutSource
from r3train.loop.run_evaluations import Evaluations
from r3train.loop.server_weights import ServerWeights
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter
from r3train.types import Scored


class Servers(Protocol):
    """The servers of a run, as the loop needs them (``launch.start.servers``)."""

    is_deserted: bool  # servers come and go, and none is there
    score_joiner: Callable[[int, int, int], str]  # see ``Canaries.score_joiner``

    def restart(self, cause: str) -> None:
        """Let lost servers leave, or start those of the run again; new ones get no request before the next publish."""

    def unchanged(self) -> AbstractContextManager[None]:
        """A block in which no server joins."""

    def requests_wait(self) -> AbstractContextManager[None]:
        """A block in which no request is sent to servers whose weights change."""

    def drop(self, server: int, why: str) -> None:
        """Let a server leave that does not hold what it should."""

    def keep_onloaded(self, *kinds: str) -> None:
        """Let every server hold these kinds of memory alone (--colocate)."""

    def stop(self) -> None:
        """End the servers of this run, which generates no more."""

    def fault_counts(self) -> dict[str, int]:
        """Count bad answers, restarts of servers, and requests and tokens that restarts resumed."""


class Rollouts(Protocol):
    """Source of rollouts: servers (``launch.start.rollouts``), or files."""

    def start_producer(self) -> RolloutSource:
        """Start what gives groups for training: a ``Producer``, or another with these methods."""

    def resume(self) -> None:
        """Go on after an update that failed: restarted servers hold the newest weights now."""

    def canary_texts(self, count: int, longest: int) -> list[np.ndarray]:
        """Texts of the run's own kind, int32[longest] each."""

    def route_wire_bytes(self) -> int:
        """Base64 bytes of routes that this process has received."""


@dataclass(frozen=True)
class RankZero:
    """The parts that rank 0 holds and other ranks do not; a run without a server has neither servers nor weights."""

    servers: Servers | None
    weights: ServerWeights | None
    rollouts: Rollouts
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
            # of this wait only: what was generated before it took none of its seconds
            tokens = stats["generated_tokens"] - first["generated_tokens"]
            display.rollout_update(min(groups_done, batch_size), tokens)

        groups = source.next_batch(rollout_id, lambda stats: show(stats["buffered_groups"], stats))
        show(len(groups), source.stats())
        return groups

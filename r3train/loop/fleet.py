"""The parts that rank 0 has in the loop: the servers' side, the display, the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.engine.publish import WeightPublisher
from r3train.engine.publish_disk import Comparison
from r3train.generation.eval_sets import EvalSet
from r3train.hf_checkpoint import NamedTensors
from r3train.loop.run_evaluations import Evaluations
from r3train.loop.rollout_source import RolloutSource
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter
from r3train.types import CanaryScores, Scored


class RolloutFleet:
    """The servers of a run on rank 0; the methods here are those of a run without a server.

    The configuration's checks refuse settings by which such a run would call a method that raises.
    """

    publisher: WeightPublisher | None = None

    def start_server(self) -> None:
        """Start the run's servers; ``wait_ready`` waits for them."""

    def wait_ready(self) -> None:
        """Wait for the servers."""

    def start_producer(self) -> RolloutSource:
        """Start what gives groups for training."""
        raise NotImplementedError

    def eval_sets(self) -> list[EvalSet]:
        """The evaluation sets, for servers to answer."""
        return []

    def compare_weights(self, weights: NamedTensors, version: int) -> Comparison:
        """Hold every server's tensors against these, and leave the checkpoint that was written of them."""
        raise AssertionError("there is no server")

    def canary_texts(self, count: int, longest: int) -> list[np.ndarray]:
        """Texts of the run's own kind, int32[longest] each."""
        raise AssertionError("there is no server")

    def read_canaries(
        self,
        texts: Sequence[np.ndarray],
        keys: Sequence[str],
        version: int,
        *,
        halves: int,
        drawn: int,
        at_once: int,
    ) -> Callable[[], tuple[dict[int, list[CanaryScores]], float]]:
        """Let every server that holds ``version`` score texts, each with its cache key, ``at_once`` at a time.

        drawn: tokens that it draws after each.  The result waits for the scores, by server, and the seconds they took.
        """
        raise AssertionError("there is no server")

    def weight_checksums(
        self, version: int | None
    ) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
        """The checksums of the tensors of every server that holds ``version``, None for all, and each server's layout."""
        raise AssertionError("there is no server")

    def route_wire_bytes(self) -> int:
        """Base64 bytes of routes that this process has received."""
        return 0

    def keep_onloaded(self, *kinds: str) -> None:
        """Let every server hold these kinds of memory alone (--colocate)."""
        raise AssertionError("there is no server")

    def stop_servers(self) -> None:
        """End the servers of this run, which generates no more."""

    def restart(self) -> None:
        """Restart the servers; they hold the checkpoint's weights until the next publish."""
        raise AssertionError("there is no server")

    def unchanged(self) -> AbstractContextManager[None]:
        """A block in which no server joins."""
        return nullcontext()

    @property
    def is_deserted(self) -> bool:
        """True where servers come and go, and none is there."""
        return False

    def drop(self, server: int, why: str) -> None:
        """Let a server leave that does not hold what it should."""
        raise AssertionError("there is no server")

    def restored(self, version: int) -> None:
        """Send broken-off requests again: restarted servers now hold ``version``."""

    def fault_counts(self) -> dict[str, int]:
        """Count bad answers, restarts of servers, and requests and tokens that restarts resumed."""
        return {}


@dataclass(frozen=True)
class RankZero:
    """The parts that rank 0 holds and other ranks do not."""

    engines: RolloutFleet
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

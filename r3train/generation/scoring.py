"""Rewards on a thread pool, so that they overlap with generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from r3train.types import RolloutSample

_AWAITED_S = 30.0


class Scoring:
    """Gives rewards, and knows which rollouts are complete but for theirs.

    ``score`` runs on a pool of ``threads``; without it every reward is 0.  ``changed`` guards the
    list of who waits; the methods that say so are called with it held.
    """

    def __init__(
        self,
        score: Callable[[RolloutSample], float] | None,
        threads: int,
        changed: threading.Condition,
    ) -> None:
        self._score = score
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reward")
        self._changed = changed
        self._waiting: set[int] = set()  # sample ids

    def begin(self, sample_id: int) -> None:
        """A rollout waits for nothing but its reward; call with the condition held."""
        self._waiting.add(sample_id)

    def end(self, sample_id: int) -> None:
        """It waits no longer, whatever came of it."""
        with self._changed:
            self._waiting.discard(sample_id)
            self._changed.notify_all()

    async def reward(self, sample: RolloutSample, own: float | None) -> float:
        """The environment's ``own`` reward, else the scored text's; raises what ``score`` did."""
        if own is not None:
            return own
        if self._score is None:
            return 0.0
        loop = asyncio.get_running_loop()
        return float(await loop.run_in_executor(self._pool, self._score, sample))

    def settle(self) -> None:
        """Wait a while for the rewards that are due now; call with the condition held."""
        now = set(self._waiting)
        self._changed.wait_for(lambda: not now & self._waiting, timeout=_AWAITED_S)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

"""Slots: how many calls of rollouts and of an evaluation may be under way together.

A call takes its slot before its first request and gives it back at the end of its answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from r3train.config.rollout_settings import RolloutSection
from r3train.generation.shared import Shared


class Slots:
    """The slots in flight.  Resumed rollouts and calls of an evaluation come before new rollouts."""

    def __init__(self, rollout: RolloutSection, shared: Shared) -> None:
        self._most = rollout.max_concurrency
        self._half = max(1, rollout.most_in_flight // 2)
        self._shared = shared
        self._evaluating = 0  # slots taken by an evaluation, apart from those of rollouts
        self._waiting = 0  # resumed rollouts and calls of an evaluation that wait for a slot
        # retracted rollouts that keep their slot and wait for others to end
        self._short_of_memory = 0

    @property
    def in_flight(self) -> int:
        """Slots that rollouts hold."""
        return self._shared.counts.in_flight

    @property
    def for_new_rollouts(self) -> bool:
        """True if a rollout that was never sent may take a slot: after resumed and retracted ones."""
        return not self._short_of_memory and self._waiting < self._free

    @property
    def _free(self) -> int:
        return self._most - self.in_flight - self._evaluating

    def take(self) -> None:
        """Take a free slot for a rollout's request."""
        self._shared.counts.change_in_flight(1)

    def give_back(self) -> None:
        """Give a rollout's slot back."""
        self._shared.counts.change_in_flight(-1)
        self._shared.changed()

    async def wait_for_free_slot(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for a free slot, ahead of new rollouts, and until ``may_go_on``; take it before the next await."""
        self._waiting += 1
        try:
            await self._shared.until(lambda: may_go_on() and self._free > 0, though_failed=True)
        finally:
            self._waiting -= 1

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold a slot, which is free, for a call of an evaluation."""
        self._evaluating += 1
        try:
            yield
        finally:
            self._evaluating -= 1
            self._shared.changed()

    async def wait_for_evaluation_slot(self) -> None:
        """Wait for a free slot, and until no retracted rollout waits for the servers' memory."""
        await self.wait_for_free_slot(lambda: not self._short_of_memory)

    async def memory_for_retracted(self, may_go_on: Callable[[], bool]) -> None:
        """Wait until fewer than half of ``most_in_flight`` are busy, not counting waiters here.

        New rollouts are held back meanwhile.

        A server retracts the request with the fewest tokens first.  If a retracted request were sent
        again among as many others, it would have the fewest once more (seen 42 times in a row).  After
        the wait, requests that are sent later have fewer tokens than it.  KV pools that hold half of what
        all slots need have room for it then.
        """
        self._short_of_memory += 1
        try:
            await self._shared.until(
                lambda: may_go_on()
                and self.in_flight + self._evaluating - self._short_of_memory < self._half,
                though_failed=True,
            )
        finally:
            self._short_of_memory -= 1
            self._shared.changed()

"""Places in flight: how many requests may be with the engines, and who waits to go on."""

from __future__ import annotations

import asyncio
import threading

from r3train.generation.rates import Rates


class Flight:
    """Counts requests in flight, up to ``limit``; a rollout that goes on comes before a new one.

    ``changed`` guards it; the methods that say so are called with it held.
    """

    def __init__(self, limit: int, changed: threading.Condition, rates: Rates) -> None:
        if limit < 1:
            raise ValueError(f"max_concurrency is {limit}, expected at least 1")
        self.limit = limit
        self.count = 0
        self.paused = 0  # weight updates under way: nothing is sent
        self._changed = changed
        self._rates = rates
        self._going_on = 0  # rollouts that wait for a place to go on
        self._next_change: asyncio.Future | None = None  # what they wait for

    def has_place(self) -> bool:
        """Whether a new rollout may be sent; call with the condition held."""
        return not self.paused and self.count + self._going_on < self.limit

    def take(self) -> None:
        """Take a place; call with the condition held."""
        self.count += 1
        self._rates.in_flight(self.count)

    def leave(self) -> None:
        """Give a place back; call with the condition held."""
        self.count -= 1
        self._rates.in_flight(self.count)

    async def place_to_go_on(self) -> None:
        """Wait for a place, for a rollout that was sent before."""
        self._going_on += 1
        try:
            while True:
                with self._changed:
                    if not self.paused and self.count < self.limit:
                        return self.take()
                    if self._next_change is None:
                        self._next_change = asyncio.get_running_loop().create_future()
                    changed = self._next_change
                await asyncio.shield(changed)
        finally:
            self._going_on -= 1

    def wake(self) -> None:
        """Something has changed; call in the loop."""
        with self._changed:
            waiting, self._next_change = self._next_change, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

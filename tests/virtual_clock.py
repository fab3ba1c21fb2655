"""A clock of a producer's event loop, which passes only while the test waits for the loop, and then at once.

While a call of another thread is under way, the loop does not sleep until its next timer: its time jumps there.  While
none is, and while work of the loop is under way in a thread, time stands still.  So a test of sleeping parts takes the
time of its computations, and on a loaded machine it sees the same as on an idle one.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class VirtualClock:
    """The time of its loops; in the place of the module ``time``, too."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waited_for: set[Future] = set()  # calls of other threads
        self.aside: set[asyncio.Future] = set()  # work of the loop in threads
        self._post = asyncio.run_coroutine_threadsafe

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """In the place of ``asyncio.new_event_loop``."""
        self.loop = _Loop(self)
        return self.loop

    def run_coroutine_threadsafe(self, call: Coroutine, loop: asyncio.AbstractEventLoop) -> Future:
        """In the place of asyncio's."""
        future = self._post(call, loop)
        self.waited_for.add(future)
        future.add_done_callback(self.waited_for.discard)
        loop.call_soon_threadsafe(lambda: None)  # it may stand still
        return future

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let so much time pass in the loop."""
        self.run_coroutine_threadsafe(asyncio.sleep(seconds), self.loop).result()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self.clock.now_s

    def run_in_executor(self, executor: Any, call: Any, *arguments: Any) -> asyncio.Future:
        future = super().run_in_executor(executor, call, *arguments)
        self.clock.aside.add(future)
        future.add_done_callback(self.clock.aside.discard)
        return future


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if found := super().select(0):
            return found
        if self.clock.aside or not self.clock.waited_for:
            return super().select(None)
        self.clock.now_s += timeout
        return []

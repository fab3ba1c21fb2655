"""State that all parts of a producer share; touched in its event loop only, so nothing is locked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from r3train.engine.backend import RolloutBackend
from r3train.generation.counts import Counts


class Shared:
    """The producer's backend, weight version, counts and first error, and a signal of every change.

    backend: None until it was made.  version: the weight version that the servers hold.  failure: the
    first error of the producer, None while there is none; it is raised by whoever waits.
    on_change: set by the scheduler, which sends what may be sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, version: int) -> None:
        self.loop = loop
        self.backend: RolloutBackend | None = None
        self.version = version
        self.counts = Counts()
        self.failure: BaseException | None = None
        self.closing = False
        self.on_change: Callable[[], None] = lambda: None
        self._changed = loop.create_future()  # done and replaced at every change

    @property
    def sends_new_rollouts(self) -> bool:
        """True while new rollouts may be sent at all; calls that hold a slot go on."""
        return self.failure is None and not self.closing and self.backend is not None

    def changed(self) -> None:
        """Send all rollouts that may be sent, and wake all waiters; call it after every change."""
        try:
            self.on_change()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self.failure = self.failure or error
        changed, self._changed = self._changed, self.loop.create_future()
        changed.set_result(None)

    async def until(self, done: Callable[[], bool], *, though_failed: bool = False) -> None:
        """Wait for a condition; raise the producer's failure unless ``though_failed``."""
        while not done():
            if not though_failed:
                self.raise_failure()
            await asyncio.shield(self._changed)

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and wake whoever waits."""
        self.failure = self.failure or error
        self.changed()

    def raise_failure(self) -> None:
        """Raise the producer's failure, if there is one."""
        if self.failure is not None:
            raise self.failure

"""State that all parts of a producer share: its counts and its slots, and a signal of every change.

Touched in its event loop only, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import Drafts, RolloutBackend


S, T = TypeVar("S"), TypeVar("T")

_LOOK_S = 0.01


@dataclass
class Counts:
    """Counters of one producer."""

    generated_tokens: int = 0
    finished_samples: int = 0
    resumed_episodes: int = 0  # after an update aborted them
    retracted_answers: int = 0  # by a server, kept or not
    drafts_proposed: int = 0  # by servers that decode speculatively
    drafts_accepted: int = 0
    draft_verifications: int = 0
    recheck_tokens: int = 0  # of texts that servers rechecked
    waiting_s: float = 0.0  # time that the training thread waited for batches
    in_flight: int = 0  # slots taken, each by one episode's call
    idle_s: float = 0.0  # time with nothing in flight
    longest_hold_s: float = (
        0.0  # of the event loop by one piece of work, between the last two batches
    )

    def __post_init__(self) -> None:
        self._began = self._changed = time.monotonic()
        self._hold_s = 0.0  # the longest since the last batch

    def change_in_flight(self, change: int) -> None:
        """Note that an episode takes a slot (1), or gives it back (-1)."""
        now = time.monotonic()
        if self.in_flight == 0:
            self.idle_s += now - self._changed
        self.in_flight += change
        self._changed = now

    def note_hold(self, seconds: float) -> None:
        """Note that the event loop came to a timer so late."""
        self._hold_s = max(self._hold_s, seconds)

    def batch_taken(self) -> None:
        """Begin to look for the longest hold until the next batch."""
        self.longest_hold_s, self._hold_s = self._hold_s, 0.0

    def add(self, drafts: Drafts) -> None:
        """Count what came of an answer's drafts."""
        self.drafts_proposed += drafts.proposed
        self.drafts_accepted += drafts.accepted
        self.draft_verifications += drafts.verifications

    def stats(self) -> dict[str, Any]:
        """Return the counts, and the seconds since the first."""
        self.change_in_flight(0)
        return asdict(self) | {"wall_s": self._changed - self._began}


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
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")

    @property
    def sends_new_episodes(self) -> bool:
        """True while new episodes may be sent at all; calls that hold a slot go on."""
        return self.failure is None and not self.closing and self.backend is not None

    async def aside(self, call: Callable[[T], S], argument: T) -> S:
        """Make a call in a thread of its own, of all such calls: several would only take turns."""
        return await self.loop.run_in_executor(self._aside, call, argument)

    def changed(self) -> None:
        """Send all episodes that may be sent, and wake all waiters; call it after every change."""
        try:
            self.on_change()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self.failure = self.failure or error
        changed, self._changed = self._changed, self.loop.create_future()
        changed.set_result(None)

    def watch_loop(self, due_s: float) -> None:
        """Note how late the loop comes to this, which was due at ``due_s`` of its clock; again until the end."""
        now_s = self.loop.time()
        self.counts.note_hold(now_s - due_s)
        if not self.closing:
            self.loop.call_at(now_s + _LOOK_S, self.watch_loop, now_s + _LOOK_S)

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


class Slots:
    """The slots in flight.  Resumed episodes and calls of an evaluation come before new episodes."""

    def __init__(self, rollout: RolloutSection, shared: Shared) -> None:
        self._rollout = rollout
        self._shared = shared
        self._evaluating = 0  # slots taken by an evaluation, apart from those of episodes
        self._waiting = 0  # resumed episodes and calls of an evaluation that wait for a slot
        # retracted requests that keep their slot and wait for others to end
        self._short_of_memory = 0

    @property
    def in_flight(self) -> int:
        """Slots that episodes hold."""
        return self._shared.counts.in_flight

    @property
    def for_new_episodes(self) -> bool:
        """True if an episode that was never sent may take a slot: after resumed and retracted ones."""
        return not self._short_of_memory and self._waiting < self._free

    @property
    def _most(self) -> int:
        """The slots that there are: of servers that come and go, those of the present ones."""
        if self._rollout.rollout_engines_file is None:
            return self._rollout.max_concurrency
        backend = self._shared.backend
        return self._rollout.concurrency(len(backend.servers()) if backend is not None else 0)

    @property
    def _free(self) -> int:
        return self._most - self.in_flight - self._evaluating

    def take(self) -> None:
        """Take a free slot for an episode's request."""
        self._shared.counts.change_in_flight(1)

    def give_back(self) -> None:
        """Give an episode's slot back."""
        self._shared.counts.change_in_flight(-1)
        self._shared.changed()

    async def wait_for_free_slot(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for a free slot, ahead of new episodes, and until ``may_go_on``; take it before the next await."""
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
        """Wait for a free slot, and until no retracted request waits for the servers' memory."""
        await self.wait_for_free_slot(lambda: not self._short_of_memory)

    def _half(self) -> int:
        return max(1, min(self._most, self._rollout.most_samples_in_flight) // 2)

    async def memory_for_retracted(self, may_go_on: Callable[[], bool]) -> None:
        """Wait until fewer than half of the requests that may be in flight are busy, not counting waiters here.

        New episodes are held back meanwhile.

        A server retracts the request with the fewest tokens first.  If a retracted request were sent
        again among as many others, it would have the fewest once more (seen 42 times in a row).  After
        the wait, requests that are sent later have fewer tokens than it.  KV pools that hold half of what
        all slots need have room for it then.
        """
        self._short_of_memory += 1
        try:
            await self._shared.until(
                lambda: may_go_on()
                and self.in_flight + self._evaluating - self._short_of_memory < self._half(),
                though_failed=True,
            )
        finally:
            self._short_of_memory -= 1
            self._shared.changed()

"""Rollouts made while the actor trains: a thread that keeps the engines as busy as staleness allows.

The bookkeeping (what may be submitted, what is too old, what a step takes) is ``group_buffer``'s;
here are the thread, the requests, and what happens to them while new weights are published.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from r3train.generation import producer_state
from r3train.engine.backend import RolloutBackend, SamplingParams
from r3train.generation.episode import Episode, generate_once
from r3train.generation.flight import Flight
from r3train.generation.buffer import BufferLimits, Group, GroupBuffer, Outcome
from r3train.engine.loop_thread import LoopThread
from r3train.generation.producer_state import ProducerState
from r3train.generation.rates import Rates
from r3train.generation.scoring import Scoring
from r3train.generation.tasks import RolloutItem, RolloutTasks
from r3train.generation.turns import Sending, Turns
from r3train.generation.update_pause import UpdatePause
from r3train.types import Prompt, RolloutSample, Scored

OnWait = Callable[[dict[str, Any]], None]

_TICK_S = 0.2
_ALIVE_EVERY_S = 0.5


class Producer:
    """Continuous generation on its own thread and event loop; every public method is thread-safe.

    ``make_backend`` is called once, inside the producer's loop.  ``prompt_for(g)`` gives the prompt
    of group g; ``score`` runs on a thread pool, so that rewards overlap with generation; without
    it every reward is 0.  ``check_alive`` raises when an engine process has ended.  Steps run from
    ``start_step`` (also the first weight version) up to, not including, ``num_rollout``.
    ``pause_mode`` says what a weight update does to requests in flight.  ``make_episode`` makes the
    course of one rollout (one turn without it).  ``on_outcome`` is told what became of each prompt.
    ``state`` is what an earlier run's ``snapshot`` gave.  ``segment_len``: see ``Sending``.

    A failure anywhere in the producer is raised by every later call that waits; what is in flight
    is not cut off by it, so that ``snapshot`` still finds what was complete.
    """

    def __init__(
        self,
        make_backend: Callable[[], RolloutBackend],
        prompt_for: Callable[[int], Prompt],
        sampling: SamplingParams,
        *,
        rollout_batch_size: int,
        n_samples_per_prompt: int,
        num_rollout: int,
        max_weight_staleness: int,
        max_concurrency: int,
        start_step: int = 0,
        over_sampling_batch_size: int | None = None,
        buffer_size: int | None = None,
        stale_policy: str = "drop",
        filters: Sequence[str] = (),
        pause_mode: str = "drain",
        score: Callable[[RolloutSample], float] | None = None,
        score_threads: int = 4,
        check_alive: Callable[[], None] | None = None,
        make_episode: Callable[[Prompt], Episode] | None = None,
        samples_per_rollout: int = 1,
        on_outcome: Callable[[Outcome], None] | None = None,
        state: ProducerState | None = None,
        segment_len: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        submitted = over_sampling_batch_size or rollout_batch_size
        allowed = (max_weight_staleness + 1) * rollout_batch_size + submitted - rollout_batch_size
        limits = BufferLimits(
            batch=rollout_batch_size,
            samples=n_samples_per_prompt,
            num_rollout=num_rollout,
            staleness=max_weight_staleness,
            over_sampling=submitted,
            size=buffer_size or allowed,
            stale_policy=stale_policy,
            filters=tuple(filters),
        )
        self._make_backend = make_backend
        self._prompt_for = prompt_for
        self._sampling = sampling
        self._limits = limits
        self._pause = UpdatePause(pause_mode, self._on_loop, self._empty)
        self._check_alive = check_alive
        self._make_episode = make_episode or (lambda prompt: generate_once)
        self._samples_per_rollout = samples_per_rollout
        self._segment_len = segment_len
        self._decode = decode
        self._on_outcome = on_outcome

        # Guarded by _changed, which is notified after every change.
        self._changed = threading.Condition()
        self._version = start_step
        self._buffer = GroupBuffer(
            limits, start_step=start_step, next_group=start_step * rollout_batch_size
        )
        self._items: deque[RolloutItem] = deque()
        self._rates = Rates()
        self._flight = Flight(max_concurrency, self._changed, self._rates)
        self._error: BaseException | None = None
        self._closing = False
        self._scoring = Scoring(score, score_threads, self._changed)
        self._tasks = RolloutTasks()
        if state is not None:
            self._restore(state)

        self._backend: RolloutBackend | None = None
        self._wake: asyncio.Event | None = None
        self._thread = LoopThread("producer", self._fail)
        self._thread.start(self._produce)

    # ---- the producer's own thread -------------------------------------------------------------

    async def _produce(self) -> None:
        self._wake = asyncio.Event()
        self._backend = backend = self._make_backend()
        sending = Sending(
            backend,
            self._sampling,
            self._flight,
            self._rates,
            self._changed,
            version=lambda: self._version,
            aborting=lambda: self._pause.aborting,
            left=self._leave_flight,
            exact_version=self._pause.exact_version,
            segment_len=self._segment_len,
            decode=self._text,
        )
        try:
            async with self._tasks.running():
                while not self._closing:
                    item = self._next_item()
                    if item is None:
                        await self._sleep_until_changed()
                        continue
                    self._tasks.start(item.key, self._one(sending, item))
        finally:
            await self._pause.close(backend)
            await backend.aclose()

    def _text(self, sample: RolloutSample) -> str:
        if self._decode is None:
            return ""
        return self._decode(sample.token_ids[sample.prompt_len :].tolist())

    def _next_item(self) -> RolloutItem | None:
        """The next rollout to send, with its place in flight taken; None while it must wait."""
        with self._changed:
            if self._error is not None or not self._flight.has_place():
                return None
            while True:
                if not self._items and not self._submit_group():
                    return None
                item = self._items.popleft()
                if self._buffer.current(item.group.group_id, item.attempt) is item.group:
                    break
            if item.group.started_version is None:
                item.group.started_version = self._version
            self._flight.take()
            return item

    def _submit_group(self) -> bool:
        buffer = self._buffer
        if buffer.room(self._version) <= 0:
            return False
        new = self._prompt_for(buffer.next_group) if buffer.wants_prompt() else None
        self._add_items(buffer.submit(new))
        return True

    def _add_items(self, group: Group) -> None:
        for place in range(self._limits.samples):
            if place not in group.samples:
                sample_id = (group.group_id * self._limits.samples + place) * (
                    self._samples_per_rollout
                )
                episode = self._make_episode(group.prompt)
                self._items.append(RolloutItem(group, group.attempt, place, sample_id, episode))

    async def _sleep_until_changed(self) -> None:
        assert self._wake is not None
        await self._wake.wait()
        self._wake.clear()

    async def _one(self, sending: Sending, item: RolloutItem) -> None:
        """Make one rollout, score it, and put it into its group; a failure is the producer's."""
        try:
            await self._make(sending, item)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._fail(error)
        finally:
            self._scoring.end(item.sample_id)

    async def _make(self, sending: Sending, item: RolloutItem) -> None:
        group = item.group
        turns = Turns(sending, group.prompt, item.sample_id, group.group_id)
        try:
            samples, reward = await item.episode(
                turns, group.prompt, sampling=self._sampling, sample_id=item.sample_id
            )
        finally:
            turns.release()
        with self._changed:
            self._rates.finished(samples)
            self._scoring.begin(item.sample_id)
        scored = [(sample, await self._scoring.reward(sample, reward)) for sample in samples]
        with self._changed:
            if self._buffer.current(group.group_id, item.attempt) is group:
                self._buffer.finish(group, item.place, scored)
                self._tell_outcomes()
            self._notify()

    def _leave_flight(self) -> None:
        with self._changed:
            self._flight.leave()
            self._notify()

    def _notify(self) -> None:
        """Wake both sides; call with the condition held."""
        self._changed.notify_all()
        if self._wake is not None:
            self._thread.soon(self._wake_all)

    def _wake_all(self) -> None:
        self._flight.wake()
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _tell_outcomes(self) -> None:
        for outcome in self._buffer.drain_log():
            if self._on_outcome is not None:
                self._on_outcome(outcome)

    def _expire(self) -> None:
        """Take out what would be too stale at the next step; call with the condition held."""
        for group in self._buffer.expire(self._buffer.next_step):
            self._thread.soon(self._tasks.cancel, (group.group_id, group.attempt))
        self._tell_outcomes()

    def _cancel_all(self) -> None:
        """End what no step will take; call with the condition held."""
        self._items.clear()
        self._thread.soon(self._tasks.cancel_all)

    # ---- the training thread's side ------------------------------------------------------------

    def _wait_for(self, done: Callable[[], bool], on_wait: OnWait | None = None) -> None:
        """Wait with the condition held until ``done``; raises what the producer or engine did."""
        next_alive = 0.0
        while not done():
            if self._error is not None:
                raise self._error
            assert not self._closing, "the producer is closed"
            now = time.monotonic()
            if self._check_alive is not None and now >= next_alive:
                next_alive = now + _ALIVE_EVERY_S
                self._check_alive()
            if on_wait is not None:
                on_wait(self._stats())
            self._changed.wait(_TICK_S)

    def next_batch(self, step: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """The groups of one train step, in order of group id, once enough are complete.

        ``on_wait(stats)`` is called about five times a second meanwhile.  Raises the producer's
        own failure, or EngineDied, at once.
        """
        assert step < self._limits.num_rollout, f"step {step} of {self._limits.num_rollout}"
        began = time.monotonic()
        with self._changed:
            assert step - self._version <= self._limits.staleness, (
                f"step {step} is never submitted while the servers hold version {self._version}: "
                f"max_weight_staleness is {self._limits.staleness}"
            )
            expected = self._buffer.next_step
            assert step == expected, f"step {step} was asked for, step {expected} is the next"
            self._expire()
            self._notify()
            try:
                self._wait_for(lambda: self._buffer.ready() == self._limits.batch, on_wait)
            finally:
                self._rates.waiting_s += time.monotonic() - began
            groups = self._buffer.take()
            self._expire()
            if self._buffer.next_step == self._limits.num_rollout:
                self._cancel_all()
            self._tell_outcomes()
            self._notify()
            return [group.scored() for group in groups]

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        """Nothing is generated inside: what that does to requests in flight is ``pause_mode``.

        Without an error all goes on afterwards, under the version that ``set_version`` said.  After
        one nothing more is sent: nobody knows which weights the servers hold.
        """
        with self._changed:
            self._flight.paused += 1
            self._expire()
        with self._pause.held():
            yield
        with self._changed:
            self._flight.paused -= 1
            self._notify()

    def _empty(self, until: float | None) -> bool:
        """Wait until nothing is in flight, or until then; whether nothing is."""
        with self._changed:
            self._wait_for(
                lambda: self._flight.count == 0 or (until is not None and time.monotonic() >= until)
            )
            return self._flight.count == 0

    def _on_loop(self, call: Callable[[RolloutBackend], Any]) -> None:
        """Make a call of the backend in the producer's loop, and wait for it."""
        with self._changed:
            if self._error is not None:
                raise self._error
            backend = self._backend
        if backend is not None:
            self._thread.wait_for(lambda: call(backend))

    def resume(self) -> None:
        """Go on after a failed ``quiesced``: new servers hold what ``set_version`` said."""
        with self._changed:
            self._flight.paused = 0
            self._pause.forget()
            self._notify()

    @property
    def failure(self) -> BaseException | None:
        """What went wrong in the producer, if anything did."""
        with self._changed:
            return self._error

    def set_version(self, version: int) -> None:
        """Say which weights the servers hold from now on; call it inside ``quiesced``."""
        with self._changed:
            assert version >= self._version, f"weight version {version} after {self._version}"
            self._version = version
            self._notify()

    def snapshot(self) -> ProducerState:
        """All that is neither trained nor dropped: what a later run's ``state`` is.

        Samples that wait for their reward are waited for, a while: they are complete.
        """
        # an answer that the loop is just handing on is through when it has done this
        self._thread.wait_for(lambda: asyncio.sleep(0))
        with self._changed:
            self._scoring.settle()
            return producer_state.pack(self._buffer)

    def _restore(self, state: ProducerState) -> None:
        for group in producer_state.unpack(self._buffer, state, self._prompt_for):
            if not group.complete:
                self._add_items(group)

    def stats(self) -> dict[str, Any]:
        """Counts for a live display; tokens_per_s is the rate of the last ten seconds."""
        with self._changed:
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        return {
            "weight_version": self._version,
            "in_flight": self._flight.count,
            "submitted_groups": self._buffer.next_group,
            "buffered_groups": self._buffer.complete_groups,
            "outcomes": dict(self._buffer.outcomes),
            **self._rates.stats(),
        }

    def close(self) -> None:
        """Cancel what runs, close the backend and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._buffer.close()
            self._tell_outcomes()
            self._notify()
        self._thread.join(timeout_s=30)
        self._scoring.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

"""Rollouts made while the actor trains: a thread that keeps the engines as busy as staleness allows.

Group g (all samples of one prompt) belongs to train step ``g // rollout_batch_size``.  It may be
submitted once that step is at most ``max_weight_staleness`` ahead of the weight version that the
servers hold, which counts completed train steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from r3train.rollout.backend import RolloutBackend, SamplingParams
from r3train.types import Prompt, RolloutSample

Scored = tuple[RolloutSample, float]
OnWait = Callable[[dict[str, Any]], None]

_TICK_S = 0.2
_ALIVE_EVERY_S = 0.5
_RATE_WINDOW_S = 10.0


class Producer:
    """Continuous generation on its own thread and event loop; every public method is thread-safe.

    ``make_backend`` is called once, inside the producer's loop.  ``prompt_for(g)`` gives the prompt
    of group g; ``score`` runs on a thread pool, so that rewards overlap with generation; without
    it every reward is 0.  ``check_alive`` raises when an engine process has ended.  Steps run from
    ``start_step`` (also the first weight version) up to, not including, ``num_rollout``.

    A failure anywhere in the producer is raised by every later call that waits.
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
        score: Callable[[RolloutSample], float] | None = None,
        score_threads: int = 4,
        check_alive: Callable[[], None] | None = None,
    ) -> None:
        for name, value, least in (
            ("rollout_batch_size", rollout_batch_size, 1),
            ("n_samples_per_prompt", n_samples_per_prompt, 1),
            ("max_weight_staleness", max_weight_staleness, 0),
            ("max_concurrency", max_concurrency, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self._make_backend = make_backend
        self._prompt_for = prompt_for
        self._sampling = sampling
        self._batch = rollout_batch_size
        self._samples = n_samples_per_prompt
        self._num_rollout = num_rollout
        self._staleness = max_weight_staleness
        self._max_concurrency = max_concurrency
        self._score = score
        self._check_alive = check_alive
        self._scorers = ThreadPoolExecutor(score_threads, thread_name_prefix="reward")

        # Guarded by _changed, which is notified after every change.
        self._changed = threading.Condition()
        self._version = start_step
        self._next_group = start_step * rollout_batch_size
        self._paused = 0
        self._in_flight = 0
        self._running = 0  # in flight, or being scored
        self._taken_steps: set[int] = set()
        self._groups: dict[int, list[Scored]] = {}
        self._pending: dict[int, dict[int, Scored]] = {}
        self._error: BaseException | None = None
        self._closing = False
        self._generated_tokens = 0
        self._finished_samples = 0
        self._aborted_samples = 0
        self._waiting_s = 0.0
        self._recent: deque[tuple[float, int]] = deque()

        self._wake: asyncio.Event | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._thread.start()

    # ---- the producer's own thread -------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._produce())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._fail(error)
        finally:
            self._loop.close()

    async def _produce(self) -> None:
        self._wake = asyncio.Event()
        backend = self._make_backend()
        try:
            async with asyncio.TaskGroup() as tasks:
                last_group = self._num_rollout * self._batch
                while self._next_group < last_group and not self._closing:
                    if not self._may_submit(self._next_group):
                        await self._sleep_until_changed()
                        continue
                    group_id = self._next_group
                    prompt = self._prompt_for(group_id)
                    for i in range(self._samples):
                        if not await self._take_slot():
                            break
                        sample_id = group_id * self._samples + i
                        tasks.create_task(self._one(backend, prompt, sample_id, group_id))
                    self._next_group += 1
                # Waiting here, rather than in the task group's exit, lets close() interrupt.
                while self._running and not self._closing:
                    await self._sleep_until_changed()
                if self._closing:
                    raise _Closing
        except BaseExceptionGroup as failures:
            real = failures.subgroup(lambda error: not isinstance(error, _Closing))
            if real is not None:
                raise _first_leaf(real) from None
        finally:
            await backend.aclose()

    def _may_submit(self, group_id: int) -> bool:
        with self._changed:
            ahead = group_id // self._batch - self._version
            return not self._paused and ahead <= self._staleness

    async def _take_slot(self) -> bool:
        """Wait for a free place in flight; False when closing."""
        while not self._closing:
            with self._changed:
                if not self._paused and self._in_flight < self._max_concurrency:
                    self._in_flight += 1
                    self._running += 1
                    return True
            await self._sleep_until_changed()
        return False

    async def _sleep_until_changed(self) -> None:
        assert self._wake is not None
        await self._wake.wait()
        self._wake.clear()

    async def _one(
        self, backend: RolloutBackend, prompt: Prompt, sample_id: int, group_id: int
    ) -> None:
        try:
            # Nothing is in flight during an update, so the version cannot change on the way.
            sample = await backend.generate(
                prompt,
                self._sampling,
                sample_id=sample_id,
                group_id=group_id,
                weight_version=self._version,
            )
        finally:
            with self._changed:
                self._in_flight -= 1
                self._notify()
        self._count(sample)
        reward = 0.0
        if self._score is not None:
            reward = float(await self._loop.run_in_executor(self._scorers, self._score, sample))
        with self._changed:
            done = self._pending.setdefault(group_id, {})
            done[sample_id] = (sample, reward)
            if len(done) == self._samples:
                del self._pending[group_id]
                self._groups[group_id] = [done[key] for key in sorted(done)]
            self._running -= 1
            self._notify()

    def _count(self, sample: RolloutSample) -> None:
        now = time.monotonic()
        with self._changed:
            self._generated_tokens += sample.response_len
            self._finished_samples += 1
            self._aborted_samples += sample.finish_reason == "abort"
            self._recent.append((now, sample.response_len))
            while self._recent and self._recent[0][0] < now - _RATE_WINDOW_S:
                self._recent.popleft()

    def _notify(self) -> None:
        """Wake both sides; call with the condition held."""
        self._changed.notify_all()
        if self._wake is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop closed in between
                self._loop.call_soon_threadsafe(self._wake.set)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

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
        """The groups of one train step, in order of group index, once all are complete.

        ``on_wait(stats)`` is called about five times a second meanwhile.  Raises the producer's
        own failure, or EngineDied, at once.
        """
        wanted = range(step * self._batch, (step + 1) * self._batch)
        assert step < self._num_rollout, f"step {step} of {self._num_rollout} was asked for"
        began = time.monotonic()
        with self._changed:
            assert step - self._version <= self._staleness, (
                f"step {step} is never submitted while the servers hold version {self._version}: "
                f"max_weight_staleness is {self._staleness}"
            )
            assert step not in self._taken_steps, f"step {step} was taken already"
            try:
                self._wait_for(lambda: all(g in self._groups for g in wanted), on_wait)
            finally:
                self._waiting_s += time.monotonic() - began
            self._taken_steps.add(step)
            return [self._groups.pop(g) for g in wanted]

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        """Nothing in flight inside: stops submitting, waits for what runs, resumes afterwards."""
        with self._changed:
            self._paused += 1
        try:
            with self._changed:
                self._wait_for(lambda: self._in_flight == 0)
            yield
        finally:
            with self._changed:
                self._paused -= 1
                self._notify()

    def set_version(self, version: int) -> None:
        """Say which weights the servers hold from now on; call it inside ``quiesced``."""
        with self._changed:
            assert version >= self._version, f"weight version {version} after {self._version}"
            self._version = version
            self._notify()

    def stats(self) -> dict[str, Any]:
        """Counts for a live display; tokens_per_s is the rate of the last ten seconds."""
        with self._changed:
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        now = time.monotonic()
        recent = [(at, tokens) for at, tokens in self._recent if at >= now - _RATE_WINDOW_S]
        span_s = max(now - recent[0][0], 1.0) if recent else 1.0
        return {
            "weight_version": self._version,
            "generated_tokens": self._generated_tokens,
            "finished_samples": self._finished_samples,
            "aborted_samples": self._aborted_samples,
            "mean_response_len": self._generated_tokens / max(self._finished_samples, 1),
            "tokens_per_s": sum(tokens for _, tokens in recent) / span_s,
            "in_flight": self._in_flight,
            "submitted_groups": self._next_group,
            "buffered_groups": len(self._groups),
            "waiting_s": self._waiting_s,
        }

    def close(self) -> None:
        """Cancel what runs, close the backend and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._notify()
        self._thread.join(timeout=30)
        self._scorers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class _Closing(Exception):
    """Cancels the task group on close."""


def _first_leaf(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

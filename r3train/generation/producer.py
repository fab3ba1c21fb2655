"""The producer makes rollouts while the actor trains, as many as the staleness limit allows.

Generation is one event loop on a thread of its own.  The producer's state (buffer, tasks, requests
in flight, weight version, counts, failure) is touched in that loop only, so nothing is locked: the
training thread posts calls into the loop and waits for their results.

    training thread                     the loop
    next_batch(n)  -- posted -->   submit groups -> episodes -> turns -> client -> engine
        |  tick: engines alive?         finished samples -> score -> buffer
        <----- groups of n -----   enough complete groups
    quiesced():    -- posted -->   pause: drain, freeze or abort what is in flight
        publish weights            (no new episode, no resumed answer)
        set_version(n + 1)  -->    go on

The parts, which share one event loop and one ``Shared``:

    Scheduler          sends the buffer's episodes as slots become free; drops what is too stale
    EpisodeTask        one episode: its calls, each a request or several
    Slots              how many requests may be in flight
    UpdateGate         drains, freezes or aborts them for a weight update
    GroupScorer        teacher and rewards of what was generated
    EvaluationRunner   an evaluation, which shares the slots; a weight update waits for its end
    GroupBuffer        which groups are submitted, too old, or part of a rollout
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, InitVar, KW_ONLY
from typing import Any, TypeVar

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import EngineError, RolloutBackend
from r3train.generation.buffer import Group, GroupBuffer, Outcome, ProducerState
from r3train.generation.eval_sets import EvalSet, Row
from r3train.generation.evaluation_runner import cancelled, EvaluationRunner
from r3train.generation.recheck import Rechecking
from r3train.generation.episode_task import RequestSettings, Episodes, Parts
from r3train.generation.scheduler import GroupScorer, Scheduler
from r3train.generation.shared import Shared, Slots
from r3train.generation.update_gate import UpdateGate
from r3train.types import Prompt, RecheckedRollout, Scored

OnWait = Callable[[dict[str, Any]], None]
Result = TypeVar("Result")

_TICK_S = 0.2
_ALIVE_EVERY_S = 0.5
_REWARDS_AWAITED_S = 30.0
_CLOSE_S = 30.0


@dataclass(eq=False)
class Producer:
    """Continuous generation next to training; the public methods are the training thread's.

    ``make_backend`` is called once, in the loop.  ``prompt_for(g)`` gives the prompt of group g.
    ``check_alive`` raises when an engine process has ended.  ``on_outcome`` is called with the
    outcome of each prompt.  ``state`` is an earlier run's ``snapshot``.  ``recheck_share`` is the share of
    the samples that the servers recheck (see ``rechecked``).  ``eval_slots`` bounds the calls of an
    evaluation while rollouts are left to generate.  Rollouts run from ``start_rollout`` (also the first
    weight version) up to, not including, ``num_rollout``.

    A failure anywhere in the producer is raised once a call would have to wait.  It does not cancel
    requests in flight, so ``snapshot`` still finds the samples that were complete.
    """

    rollout: RolloutSection
    make_backend: Callable[[], RolloutBackend]
    prompt_for: Callable[[int], Prompt]
    request_settings: RequestSettings
    _: KW_ONLY
    episodes: Episodes = Episodes()
    scorer: GroupScorer = GroupScorer()
    start_rollout: int = 0
    check_alive: Callable[[], None] = lambda: None
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    state: InitVar[ProducerState | None] = None
    recheck_share: float = 0.0
    eval_slots: int = 1

    def __post_init__(self, state: ProducerState | None) -> None:
        rollout, settings = self.rollout, self.request_settings
        self._loop = asyncio.new_event_loop()
        self._shared = Shared(self._loop, self.start_rollout)
        slots = Slots(rollout, self._shared)
        self._rechecking = Rechecking(
            rollout,
            self.recheck_share,
            self._shared.counts,
            versions_stay=settings.versions_stay,
            samples_per_episode=self.episodes.samples,
        )
        self._evaluation = EvaluationRunner(self._shared, slots)
        self._gate = UpdateGate(rollout, self._shared, slots, self._evaluation, self._rechecking)
        self._buffer = GroupBuffer(rollout, self.prompt_for, start_rollout=self.start_rollout)
        parts = Parts(
            rollout, settings, self.episodes, self._shared, slots, self._gate, self._rechecking
        )
        self._scheduler = Scheduler(parts, self._buffer, self.scorer, self.on_outcome, state)
        self._last_taken: list[Group] = []
        self._opening = self._loop.create_task(self._open())
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The first error of the producer, None while there is none."""
        return self._shared.failure

    # ---- the training thread's side ------------------------------------------------------------

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """Wait until enough groups are complete; return one rollout's, in order of group id.

        ``on_wait(stats)`` is called about five times per second meanwhile.  Raises the producer's
        own failure, or EngineDied, once it would have to wait.
        """
        while True:
            self._wait(self._batch_ready(rollout_id), on_wait)
            # a call of its own: a wait that is cut short takes nothing
            groups = self._call(self._take())
            if groups is not None:
                return groups

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        """Stop generation inside the context, in the way that ``pause_generation_mode`` says.

        Generation continues after it, under the version given to ``set_version``.  After an error
        nothing more is sent: nobody knows which weights the servers hold.
        """
        self._wait(self._gate.close(self._scheduler.expire))
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # servers of another job must not stay paused
                self._call(self._gate.thaw())
            raise
        self._call(self._gate.reopen())

    def set_version(self, version: int) -> None:
        """Set the weight version that the servers hold.

        Call it inside ``quiesced``, or with ``versions_stay`` at any time.
        """
        self._call(self._set_version(version))

    def resume(self) -> None:
        """Continue after a failed ``quiesced``, once new servers hold the version of ``set_version``."""
        self._call(self._resume())

    def snapshot(self) -> ProducerState:
        """Return the groups that are neither trained nor dropped, for a later run's ``state``.

        Waits a limited time for samples that lack only their reward.  Samples that wait for the rest of their
        group's (``score_group``) are generated again.
        """
        return self._call(self._snapshot())

    def put_back(self) -> None:
        """Take back the last batch, because it was not trained: a snapshot has it again."""
        self._call(self._put_back())

    def rechecked(self) -> RecheckedRollout | None:
        """All that was rechecked of the last batch; None without ``recheck_share``.

        Waits a limited time for what is under way.
        """
        return self._call(self._rechecked())

    def begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        """Begin to evaluate the weights that the servers hold, while rollouts are generated."""
        self._call(self._begin_evaluation(sets))

    def await_evaluation(self, on_wait: OnWait | None = None) -> None:
        """Wait until every set is evaluated or has failed; raises as ``next_batch`` does."""
        self._wait(self._shared.until(lambda: self._evaluation.is_done), on_wait)

    def take_evaluation(self) -> dict[str, list[Row] | Exception]:
        """End the evaluation; returns the rows of each set, or its error.

        A set that is not complete is given up: its error is EvaluationEnded.
        """
        return self._call(self._evaluation.take())

    def stats(self) -> dict[str, Any]:
        """Counts for a live display and for metrics."""
        return self._call(self._stats())

    def close(self) -> None:
        """Cancel all episodes, close the backend and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            with contextlib.suppress(TimeoutError, EngineError):
                self._post(self._close()).result(timeout=_CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=_CLOSE_S)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _post(self, call: Coroutine[Any, Any, Result]) -> Future[Result]:
        if not self._thread.is_alive():
            call.close()
            raise AssertionError("the producer is closed")
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _call(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Run a call in the loop and return its result; it works after a failure too."""
        return self._post(call).result()

    def _wait(self, call: Coroutine[Any, Any, None], on_wait: OnWait | None = None) -> None:
        """Run a call that waits for the engines; cancel it if an engine has ended."""
        future, next_alive = self._post(call), 0.0
        try:
            # the result first: what is ready is returned, even after an engine's death or a stop
            while not wait([future], timeout=_TICK_S).done:
                now = time.monotonic()
                if now >= next_alive:
                    next_alive = now + _ALIVE_EVERY_S
                    self.check_alive()
                if on_wait is not None:
                    on_wait(self.stats())
            future.result()
        finally:
            future.cancel()

    # ---- the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _open(self) -> None:
        """Score again what must be, make the backend, measure rounding, and then let generation begin."""
        backend, shared = None, self._shared
        shared.watch_loop(self._loop.time())
        try:
            await self._scheduler.score_again()
            backend = self.make_backend()
            if self.recheck_share:
                first = self._buffer.next_group
                batch = range(first, first + self.rollout.rollout_batch_size)
                prompts = [self.prompt_for(group) for group in batch]
                await self._rechecking.open(
                    backend, prompts, self.request_settings.sampling, shared.version
                )
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            shared.fail(error)
        finally:
            shared.backend = backend
            shared.changed()

    async def _batch_ready(self, rollout_id: int) -> None:
        rollout, buffer, version = self.rollout, self._buffer, self._shared.version
        assert rollout_id < rollout.num_rollout, f"step {rollout_id} of {rollout.num_rollout}"
        assert rollout_id - version <= rollout.max_weight_staleness, (
            f"step {rollout_id} is never submitted while the servers hold version {version}: "
            f"max_weight_staleness is {rollout.max_weight_staleness}"
        )
        expected = buffer.next_rollout
        message = f"step {rollout_id} was asked for, step {expected} is the next"
        assert rollout_id == expected, message
        began = time.monotonic()
        self._scheduler.expire()
        self._shared.changed()
        try:
            await self._shared.until(buffer.ready)
        finally:
            self._shared.counts.waiting_s += time.monotonic() - began

    async def _take(self) -> list[list[Scored]] | None:
        """Take a rollout's groups; None if an older group has been submitted again meanwhile."""
        if not self._buffer.ready():
            return None
        self._last_taken = self._scheduler.take()
        self._shared.counts.batch_taken()
        return [group.scored() for group in self._last_taken]

    async def _begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        over = self._scheduler.is_over
        most = self.rollout.max_concurrency if over else self.eval_slots
        self._evaluation.begin(sets, most, self.episodes.most or most)

    async def _set_version(self, version: int) -> None:
        shared = self._shared
        assert version >= shared.version, f"weight version {version} after {shared.version}"
        shared.version = version
        shared.changed()

    async def _resume(self) -> None:
        self._gate.reopen_for_new_servers()

    async def _snapshot(self) -> ProducerState:
        await asyncio.sleep(0)  # let answers that have already arrived be delivered
        scoring = self._scheduler.scoring
        due = set(scoring)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REWARDS_AWAITED_S):
                await self._shared.until(lambda: not due & scoring, though_failed=True)
        return self._buffer.snapshot()

    async def _put_back(self) -> None:
        self._buffer.put_back(self._last_taken)
        self._scheduler.log_outcomes()

    async def _rechecked(self) -> RecheckedRollout | None:
        return (
            await self._rechecking.rechecked_rollout(self._last_taken)
            if self.recheck_share
            else None
        )

    async def _stats(self) -> dict[str, Any]:
        return {
            "buffered_groups": self._buffer.complete_groups,
            "outcomes": dict(self._buffer.outcomes),
            **self._shared.counts.stats(),
            **self.episodes.stats(),
        }

    async def _close(self) -> None:
        self._shared.closing = True
        self._buffer.close()
        self._scheduler.log_outcomes()
        await cancelled(self._opening, *self._scheduler.tasks, *self._evaluation.tasks)
        await self._gate.end_rechecks()
        await self.episodes.close()
        if self._shared.backend is not None:
            with contextlib.suppress(EngineError):  # the loop ends in the middle of an update
                await self._gate.thaw()
            await self._shared.backend.aclose()
        if self.scorer.teacher is not None:
            await self.scorer.teacher.aclose()

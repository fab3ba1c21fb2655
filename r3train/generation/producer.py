"""The producer makes rollouts while the actor trains, as many as the staleness limit allows.

Generation is one event loop on a thread of its own.  The producer's state (buffer, tasks, requests
in flight, weight version, counts, failure) is touched in that loop alone, so nothing is locked: the
training thread posts calls into the loop and waits for their results.

    training thread                     the loop
    next_batch(n)  -- posted -->   submit groups -> episodes -> turns -> client -> engine
        |  tick: engines alive?         finished samples -> score -> buffer
        <----- groups of n -----   enough complete groups
    quiesced():    -- posted -->   pause: drain, freeze or abort what is in flight
        publish weights            (nothing is sent)
        set_version(n + 1)  -->    go on

``buffer`` decides which groups are submitted, too old, or part of a rollout.

An evaluation runs in the loop beside generation, with at most ``eval_places`` of the places in flight.
A weight update waits for its end, so one weight version answers all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, InitVar, KW_ONLY, replace
from functools import partial
from typing import Any, TypeVar

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import EngineError, RolloutBackend, SamplingParams, Segment, Teacher
from r3train.generation import stitch
from r3train.generation.buffer import Group, GroupBuffer, Outcome, ProducerState
from r3train.generation.counts import Counts
from r3train.generation.episode import Episode, generate_once
from r3train.generation.eval_sets import EvalSet, EvaluationEnded, Room, Row, evaluate
from r3train.generation.recheck import AWAITED_S, Rechecking, Unbroken
from r3train.rewards.weighted_sum import scored
from r3train.types import Prompt, RecheckedRollout, RolloutSample, Scored

OnWait = Callable[[dict[str, Any]], None]
Result = TypeVar("Result")

_TICK_S = 0.2
_ALIVE_EVERY_S = 0.5
_ABORT_EVERY_S = 0.3
_REWARDS_AWAITED_S = 30.0
_CLOSE_S = 30.0
# A request that is retracted so often in a row ends the run.  Each time it waits until half of the
# places are free: KV pools that retract it even then hold less than half of what all places need.
_MAX_RETRACTIONS = 3


async def _no_reward(sample: RolloutSample) -> float:
    return 0.0


@dataclass(eq=False)
class Producer:
    """Continuous generation beside training; the public methods are the training thread's.

    ``make_backend`` is called once, in the loop.  ``prompt_for(g)`` gives the prompt of group g.
    ``score`` gives a sample's reward if its episode gave none; without ``score`` that is 0.
    ``score_group``, in its place, gives the rewards of all samples of a group at once.
    ``teacher`` adds its log-probs to each sample before the reward.
    ``make_episode`` makes one rollout's ``Episode``; without it a rollout is one turn.  ``decode``
    gives the text of response tokens.  ``segment_len`` bounds the tokens of one request: a longer
    answer takes several requests, and the tokens of finished ones survive a lost server.
    ``check_alive`` raises when an engine process has ended.  ``on_outcome`` is called with the
    outcome of each prompt.  ``state`` is an earlier run's ``snapshot``.  With ``keep_decoded``
    samples keep the decoded rows of each answer, for the evidence.  ``pool_facts`` says how much
    the servers' KV pools hold and how much the requests need, for the error of a request that is
    retracted again and again.  ``audit_share`` is the share of the samples that the servers compute
    again (see ``rechecked``).  ``eval_places`` bounds the requests of an evaluation while rollouts are
    left to generate.  With ``versions_stay`` servers keep a version beside newer ones, so an answer ends
    on the version on which it began, and ``set_version`` needs no ``quiesced``.  Rollouts run from
    ``start_rollout`` (also the first weight version) up to, not including, ``num_rollout``.

    A failure anywhere in the producer is raised by every later call that waits.  It does not cancel
    requests in flight, so ``snapshot`` still finds the samples that were complete.
    """

    rollout: RolloutSection
    make_backend: Callable[[], RolloutBackend]
    prompt_for: Callable[[int], Prompt]
    sampling: SamplingParams
    _: KW_ONLY
    start_rollout: int = 0
    segment_len: int | None = None
    score: Callable[[RolloutSample], Awaitable[float]] = _no_reward
    score_group: Callable[[Sequence[RolloutSample]], Awaitable[list[float]]] | None = None
    teacher: Teacher | None = None
    make_episode: Callable[[Prompt], Episode] = lambda prompt: generate_once
    decode: Callable[[Sequence[int]], str] = lambda token_ids: ""
    check_alive: Callable[[], None] = lambda: None
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    state: InitVar[ProducerState | None] = None
    keep_decoded: bool = False
    pool_facts: str | None = None
    audit_share: float = 0.0
    eval_places: int = 1
    versions_stay: bool = False

    def __post_init__(self, state: ProducerState | None) -> None:
        # True: a frozen request continues under a newer version
        self._freezes = self.rollout.pause_generation_mode in ("in_place", "retract")
        # the first error of the producer, None while there is none
        self.failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._changed = self._loop.create_future()  # done and replaced at every change
        self._backend: RolloutBackend | None = None
        self._version = self.start_rollout
        self._buffer = GroupBuffer(self.rollout, self.prompt_for, start_rollout=self.start_rollout)
        self._unsent: deque[RolloutTask] = deque()
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self._scoring: set[int] = set()  # ids of rollouts that lack only teacher and reward
        self._last_taken: list[Group] = []
        self._counts = Counts()
        self._rechecking = Rechecking(
            self.rollout, self.audit_share, self._counts, versions_stay=self.versions_stay
        )
        self._evaluation: dict[str, asyncio.Task[list[Row]]] = {}  # of each set, by its name
        self._evaluating = 0  # places taken by an evaluation, beside those of rollouts
        self._waiting = 0  # resumed rollouts and answers of an evaluation that wait for a place
        # retracted rollouts that keep their place and wait for others to end
        self._short_of_room = 0
        self._pauses = 0  # weight updates under way: nothing is sent
        self._frozen = False  # the servers were told to pause
        self._aborting = False  # requests are aborted by an update, to be resumed after it
        self._closing = False
        if state is not None:
            for group in self._buffer.restore(state):
                self._add(group)
        self._opening = self._loop.create_task(self._open())
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._thread.start()

    # ---- the training thread's side ------------------------------------------------------------

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """Wait until enough groups are complete; return one rollout's, in order of group id.

        ``on_wait(stats)`` is called about five times per second meanwhile.  Raises the producer's
        own failure, or EngineDied, at once.
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
        self._wait(self._pause())
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # servers of another job must not stay paused
                self._call(self._thaw())
            raise
        self._call(self._go_on())

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

        Waits a limited time for samples that lack only their reward.
        """
        return self._call(self._snapshot())

    def put_back(self) -> None:
        """Take back the last batch, because it was not trained: a snapshot has it again."""
        self._call(self._put_back())

    def rechecked(self) -> RecheckedRollout | None:
        """All that was rechecked of the last batch; None without ``audit_share``.

        Waits a limited time for what is under way.
        """
        return self._call(self._rechecked())

    def begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        """Begin to evaluate the weights that the servers hold, beside generation."""
        self._call(self._begin_evaluation(sets))

    def await_evaluation(self, on_wait: OnWait | None = None) -> None:
        """Wait until every set is evaluated or has failed; raises as ``next_batch`` does."""
        self._wait(self._until(lambda: self._evaluation_done), on_wait)

    def take_evaluation(self) -> dict[str, list[Row] | Exception]:
        """End the evaluation; returns the rows of each set, or its error.

        A set that is not complete is given up: its error is EvaluationEnded.
        """
        return self._call(self._take_evaluation())

    def stats(self) -> dict[str, Any]:
        """Counts for a live display and for metrics."""
        return self._call(self._stats())

    def close(self) -> None:
        """Cancel all rollouts, close the backend and end the thread. Idempotent."""
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

    # ---- the loop: calls of the training thread --------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _open(self) -> None:
        """Make the backend, measure the servers' rounding, and then let generation begin."""
        backend = None
        try:
            backend = self.make_backend()
            if self.audit_share:
                first = self._buffer.next_group
                batch = range(first, first + self.rollout.rollout_batch_size)
                prompts = [self.prompt_for(group) for group in batch]
                await self._rechecking.open(backend, prompts, self.sampling, self._version)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._fail(error)
        finally:
            self._backend = backend
            self._advance()

    async def _batch_ready(self, rollout_id: int) -> None:
        rollout, buffer = self.rollout, self._buffer
        assert rollout_id < rollout.num_rollout, f"step {rollout_id} of {rollout.num_rollout}"
        assert rollout_id - self._version <= rollout.max_weight_staleness, (
            f"step {rollout_id} is never submitted while the servers hold version {self._version}: "
            f"max_weight_staleness is {rollout.max_weight_staleness}"
        )
        expected = buffer.next_rollout
        asked = f"step {rollout_id} was asked for, step {expected} is the next"
        assert rollout_id == expected, asked
        began = time.monotonic()
        self._expire()
        self._advance()
        try:
            await self._until(buffer.ready)
        finally:
            self._counts.waiting_s += time.monotonic() - began

    async def _take(self) -> list[list[Scored]] | None:
        """Take a rollout's groups; None if an older group has been submitted again meanwhile."""
        if not self._buffer.ready():
            return None
        groups = self._last_taken = self._buffer.take()
        self._expire()
        if self._buffer.next_rollout == self.rollout.num_rollout:  # no rollout is left
            self._unsent.clear()
            for task in self._tasks:
                task.cancel()
        self._log_outcomes()
        self._advance()
        return [group.scored() for group in groups]

    async def _begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        assert not self._evaluation, "the evaluation before was not taken"
        over = self._buffer.next_rollout == self.rollout.num_rollout  # nothing is left to generate
        places = self.rollout.max_concurrency if over else self.eval_places
        room = partial(self._evaluation_place, asyncio.Semaphore(places))
        for asked in sets:
            task = self._loop.create_task(self._evaluate(asked, self._version, room))
            task.add_done_callback(lambda _: self._advance())
            self._evaluation[asked.name] = task

    async def _evaluate(self, asked: EvalSet, version: int, room: Room) -> list[Row]:
        await self._until(lambda: self._backend is not None)
        return await evaluate(asked, self._backend, version, room)

    @contextlib.asynccontextmanager
    async def _evaluation_place(self, share: asyncio.Semaphore) -> AsyncIterator[None]:
        """Hold a place in flight for an answer of an evaluation, as many at once as its ``share`` has."""
        async with share:
            await self._free_place(lambda: not self._short_of_room)
            self._evaluating += 1
            try:
                yield
            finally:
                self._evaluating -= 1
                self._advance()

    @property
    def _evaluation_done(self) -> bool:
        return all(task.done() for task in self._evaluation.values())

    async def _take_evaluation(self) -> dict[str, list[Row] | Exception]:
        tasks, self._evaluation = self._evaluation, {}
        outcomes = await _ended(*tasks.values())
        given_up = EvaluationEnded("it was given up before its end")
        return {
            name: given_up if isinstance(found, asyncio.CancelledError) else found
            for name, found in zip(tasks, outcomes)
        }

    async def _pause(self) -> None:
        """Stop sending, and drain, freeze or abort the requests in flight."""
        mode = self.rollout.pause_generation_mode
        try:
            if mode != "drain":  # draining leaves time enough for what is rechecked
                await self._rechecked_beside_generation()
        finally:
            self._pauses += 1
        await self._until(lambda: self._evaluation_done)
        self._expire()
        await self._until(lambda: self._backend is not None)
        self._raise_failure()
        if self._freezes:
            await self._end_rechecking()
            self._frozen = True
            await self._backend.pause_generation(mode)
        elif mode == "abort":
            await self._end_rechecking()  # an abort ends these too
            self._aborting = True
            while self._counts.in_flight:
                # repeated: an abort misses a request that is still on its way to the server
                await self._backend.abort()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_EVERY_S):
                        await self._until(lambda: self._counts.in_flight == 0)
        else:
            await self._until(lambda: self._counts.in_flight == 0)
            await self._end_rechecking()

    async def _rechecked_beside_generation(self) -> None:
        """Wait a little for what is rechecked, while tokens are generated beside it."""
        under_way = self._rechecking.under_way
        for task in under_way:
            task.add_done_callback(lambda _: self._advance())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AWAITED_S):
                await self._until(
                    lambda: not self._counts.in_flight or all(task.done() for task in under_way)
                )

    async def _end_rechecking(self) -> None:
        await self._rechecking.close(idle=self._counts.in_flight == 0 and not self._closing)

    async def _thaw(self) -> None:
        if self._frozen:
            await self._backend.continue_generation()
            self._frozen = False

    async def _go_on(self) -> None:
        await self._thaw()
        self._aborting = False
        self._pauses -= 1
        if not self._pauses:
            self._rechecking.reopen()
        self._advance()

    async def _set_version(self, version: int) -> None:
        assert version >= self._version, f"weight version {version} after {self._version}"
        self._version = version
        self._advance()

    async def _resume(self) -> None:
        self._pauses = 0
        self._frozen = self._aborting = False  # the paused servers have ended
        self._rechecking.reopen()
        self._advance()

    async def _snapshot(self) -> ProducerState:
        await asyncio.sleep(0)  # let answers that have already arrived be delivered
        due = set(self._scoring)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REWARDS_AWAITED_S):
                await self._until(lambda: not due & self._scoring, though_failed=True)
        return self._buffer.snapshot()

    async def _put_back(self) -> None:
        self._buffer.put_back(self._last_taken)
        self._log_outcomes()

    async def _rechecked(self) -> RecheckedRollout | None:
        return await self._rechecking.of_groups(self._last_taken) if self.audit_share else None

    async def _stats(self) -> dict[str, Any]:
        return {
            "buffered_groups": self._buffer.complete_groups,
            "outcomes": dict(self._buffer.outcomes),
            **self._counts.stats(),
        }

    async def _close(self) -> None:
        self._closing = True
        self._buffer.close()
        self._log_outcomes()
        await _ended(self._opening, *self._tasks, *self._evaluation.values())
        await self._end_rechecking()
        if self._backend is not None:
            with contextlib.suppress(EngineError):  # the loop ends in the middle of an update
                await self._thaw()
            await self._backend.aclose()
        if self.teacher is not None:
            await self.teacher.aclose()

    # ---- the loop: its own work ------------------------------------------------------------------

    def _advance(self) -> None:
        """Send all rollouts that may be sent, and wake all waiters; called after every change."""
        try:
            while (turns := self._next()) is not None:
                turns.take_place()
                name = f"sample {turns.sample_id} of prompt {turns.group.prompt.prompt_id}"
                task = self._loop.create_task(self._one(turns), name=name)
                self._tasks[task] = turns.group
                task.add_done_callback(partial(self._forget, turns))
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self.failure = self.failure or error
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    async def _until(self, done: Callable[[], bool], *, though_failed: bool = False) -> None:
        """Wait for a condition; raise the producer's failure unless ``though_failed``."""
        while not done():
            if not though_failed:
                self._raise_failure()
            await asyncio.shield(self._changed)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._advance()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _next(self) -> RolloutTask | None:
        """The next rollout to send; None while it must wait.

        A resumed rollout comes before a new one, and so does one that was retracted.
        """
        if self.failure is not None or self._closing or self._backend is None:
            return None
        if self._pauses or self._short_of_room or self._waiting >= self._free_places:
            return None
        while self._unsent or self._submit_group():
            turns = self._unsent.popleft()
            if self._buffer.holds(turns.group):
                if turns.group.started_version is None:
                    turns.group.started_version = self._version
                return turns
        return None

    def _submit_group(self) -> bool:
        if self._buffer.room(self._version) <= 0:
            return False
        self._add(self._buffer.submit())
        return True

    def _add(self, group: Group) -> None:
        places = range(self.rollout.n_samples_per_prompt)
        self._unsent += [RolloutTask(self, group, p) for p in places if p not in group.samples]

    async def _one(self, turns: RolloutTask) -> None:
        """Make one rollout, score it, and put it into its group; an error becomes the failure."""
        try:
            await self._make(turns)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._fail(error)

    async def _make(self, turns: RolloutTask) -> None:
        group = turns.group
        try:
            samples, own = await turns.episode(
                turns, group.prompt, sampling=self.sampling, sample_id=turns.sample_id
            )
        finally:
            turns.release()
        self._rechecking.finished(group, turns.place, samples[-1], turns.unbroken, self._version)
        if not self.keep_decoded:
            samples = [replace(sample, decoded=(), decoded_masks=()) for sample in samples]
        self._counts.finished_samples += len(samples)
        self._scoring.add(turns.sample_id)
        if self.teacher is not None:
            samples = list(await asyncio.gather(*map(self.teacher, samples)))
        if self.score_group is None:
            rewards = [own if own is not None else await self.score(s) for s in samples]
            places = {turns.place: list(map(scored, samples, rewards))}
        else:
            (group.unscored[turns.place],) = samples
            if len(group.unscored) + len(group.samples) < self.rollout.n_samples_per_prompt:
                return  # the group's last rollout has it scored
            # also samples that an earlier run has scored
            earlier = {place: before[0][0] for place, before in group.samples.items()}
            whole = dict(sorted((earlier | group.unscored).items()))
            rewards = await self.score_group(list(whole.values()))
            places = {p: [scored(s, reward)] for (p, s), reward in zip(whole.items(), rewards)}
            group.samples.clear()
        if self._buffer.holds(group):
            for place, of_place in places.items():
                self._buffer.finish(group, place, of_place)
            self._log_outcomes()

    @property
    def _free_places(self) -> int:
        return self.rollout.max_concurrency - self._counts.in_flight - self._evaluating

    async def _free_place(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for a free place, before new rollouts, and until ``may_go_on``."""
        self._waiting += 1
        try:
            await self._until(lambda: may_go_on() and self._free_places > 0, though_failed=True)
        finally:
            self._waiting -= 1

    async def _room_in_the_pools(self) -> None:
        """Wait until half of the places in flight are free; nothing new is sent meanwhile.

        A server retracts the request with the fewest tokens first.  If a retracted request were sent
        again among as many others, it would have the fewest once more (seen 42 times in a row).  After
        the wait, requests that are sent later have fewer tokens than it.  Pools that hold half of what all
        places need have room for it then.
        """
        half = max(1, self.rollout.most_in_flight // 2)
        self._short_of_room += 1
        try:
            await self._until(
                lambda: not self._frozen
                and self._counts.in_flight + self._evaluating - self._short_of_room < half,
                though_failed=True,
            )
        finally:
            self._short_of_room -= 1
            self._advance()

    def _expire(self) -> None:
        """Drop or regenerate the groups that would be too stale for the next rollout."""
        stale = self._buffer.expire(self._buffer.next_rollout)
        for task, group in self._tasks.items():
            if group in stale:
                task.cancel()
        self._log_outcomes()

    def _forget(self, turns: RolloutTask, task: asyncio.Task[None]) -> None:
        turns.release()  # a task that was cancelled before it began still holds its place
        self._scoring.discard(turns.sample_id)
        del self._tasks[task]
        self._advance()

    def _log_outcomes(self) -> None:
        for outcome in self._buffer.drain_log():
            self.on_outcome(outcome)


async def _ended(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Cancel tasks, and return the result or the error of each."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class RolloutTask:
    """One rollout to make or to resume: sample number ``place`` of one attempt at a group.

    It is the ``Generate`` of its episode, and holds a place in flight while it generates.
    """

    def __init__(self, producer: Producer, group: Group, place: int) -> None:
        rollout = producer.rollout
        self._producer = producer
        self.group = group
        self.place = place
        number = group.group_id * rollout.n_samples_per_prompt + place
        self.sample_id = number * rollout.samples_per_episode
        self.episode = producer.make_episode(group.prompt)
        self._held = False
        self._retracted = 0  # answers in a row that a server retracted
        self.unbroken = Unbroken()

    def take_place(self) -> None:
        """Take a place in flight, which is free."""
        self._held = True
        self._producer._counts.change_in_flight(1)

    def release(self) -> None:
        """Give the place in flight back if it is still held."""
        if self._held:
            self._held = False
            self._producer._counts.change_in_flight(-1)
            self._producer._advance()

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        """Generate one answer, resumed after every update that aborted it.

        Under R3 the answer to a request that a server retracted is thrown away, and the same tokens
        are asked for again.  Earlier answers of the rollout came with their own rows and stay.

        The place in flight is kept between the segments of an answer, and given back during an
        update.
        """
        p, group = self._producer, self.group
        sample = resume_from or stitch.begin(
            group.prompt, sample_id=self.sample_id, group_id=group.group_id
        )
        version = p._version
        while True:
            if not self._held:
                await p._free_place(lambda: not p._pauses)
                self.take_place()
            if self._retracted:
                await p._room_in_the_pools()
            limit = stitch.shortest(turn_limit, p.segment_len)
            if not p.versions_stay:
                version = p._version
            request = stitch.next_request(
                sample,
                p.sampling,
                limit=limit,
                weight_version=version,
                exact_version=not p._freezes,
            )
            if p._freezes and not sample.loss_mask.any():
                p._rechecking.sent(group, self.place, request)
            goes_on, began = False, time.monotonic()
            try:
                segment = await p._backend.generate(request)
                self._check_newest(segment.weight_versions.max(initial=-1))
                again = self._is_retracted(segment)
                count = 0 if again else len(segment.token_ids)
                if not again:
                    self.unbroken.answered(request, segment)
                    sample = stitch.extend(sample, segment)
                waited_s = sample.generation_s + time.monotonic() - began
                sample = replace(sample, generation_s=waited_s)
                if turn_limit is not None:
                    turn_limit -= count
                left = stitch.shortest(stitch.tokens_left(sample, p.sampling), turn_limit)
                unfinished = again or stitch.is_cut(segment, limit, left)
                # checked while the place is held: once it is given back, the update may end
                interrupted = p._aborting and (unfinished or segment.finish_reason == "abort")
                # a frozen server would accept the request, and compute it from the cache of older weights
                interrupted |= p._frozen and again
                goes_on = unfinished and not interrupted
            finally:
                if not goes_on:
                    self.release()
            p._counts.generated_tokens += count
            p._counts.resumed_rollouts += interrupted and not again
            if not (interrupted or goes_on):
                break
            if left <= 0:
                sample = replace(sample, finish_reason="length")
                break
        text = p.decode(sample.token_ids[sample.prompt_len :].tolist())
        return replace(sample, text=text)

    def _is_retracted(self, segment: Segment) -> bool:
        """Count an answer that a server retracted; True if it must not be kept.

        Its rows come from the forwards that computed the request again, its log-probs from the first.
        Raises EngineError after too many in a row.
        """
        p = self._producer
        p._counts.retracted_answers += segment.num_retractions > 0
        if segment.num_retractions == 0 or segment.rows is None:
            self._retracted = 0
            return False
        if p.rollout.retraction_policy == "accept":
            return False
        self._retracted += 1
        if self._retracted == _MAX_RETRACTIONS:
            facts = f": {p.pool_facts}" if p.pool_facts else ""
            raise EngineError(
                f"sample {self.sample_id} (prompt {self.group.prompt.prompt_id!r}) was retracted by"
                f" its server {_MAX_RETRACTIONS} times in a row{facts}; lower"
                " --rollout-max-concurrency, or give the servers more memory"
                " (--sglang-mem-fraction-static, --sglang-max-total-tokens)"
            )
        return True

    def _check_newest(self, newest: int) -> None:
        given = self._producer._version
        if newest > given:
            raise ValueError(
                f"sample {self.sample_id}: a token of weight version {newest}, the servers "
                f"were given {given} at most"
            )

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
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from r3train.config.rollout import RolloutSection
from r3train.engine.backend import EngineError, RolloutBackend, SamplingParams, Segment, Teacher
from r3train.generation import stitch
from r3train.generation.buffer import Group, GroupBuffer, Outcome, ProducerState
from r3train.generation.episode import Episode, generate_once
from r3train.generation.evaluate import EvalSet, EvaluationEnded, Row, evaluate
from r3train.generation.rates import Rates
from r3train.generation.rescoring import AWAITED_S, Rescoring, Unbroken
from r3train.rewards.parts import scored
from r3train.types import Prompt, RescoredRollout, RolloutSample, Scored

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


@dataclass(frozen=True, slots=True)
class RolloutItem:
    """One rollout to make or to resume: sample number ``place`` of one attempt at a group."""

    group: Group
    attempt: int
    place: int
    sample_id: int
    sampling: SamplingParams
    episode: Episode

    @property
    def key(self) -> tuple[int, int]:
        """Group id and attempt."""
        return self.group.group_id, self.attempt


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
    again (see ``rescored``).  ``eval_places`` bounds the requests of an evaluation while rollouts are
    left to generate.  With ``versions_stay`` servers keep a version beside newer ones, so an answer ends
    on the version on which it began, and ``set_version`` needs no ``quiesced``.  Rollouts run from
    ``start_rollout`` (also the first weight version) up to, not including, ``num_rollout``.

    A failure anywhere in the producer is raised by every later call that waits.  It does not cancel
    requests in flight, so ``snapshot`` still finds the samples that were complete.
    """

    def __init__(
        self,
        rollout: RolloutSection,
        make_backend: Callable[[], RolloutBackend],
        prompt_for: Callable[[int], Prompt],
        sampling: SamplingParams,
        *,
        start_rollout: int = 0,
        segment_len: int | None = None,
        score: Callable[[RolloutSample], Awaitable[float]] | None = None,
        score_group: Callable[[Sequence[RolloutSample]], Awaitable[list[float]]] | None = None,
        teacher: Teacher | None = None,
        make_episode: Callable[[Prompt], Episode] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        check_alive: Callable[[], None] | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        state: ProducerState | None = None,
        keep_decoded: bool = False,
        pool_facts: str | None = None,
        audit_share: float = 0.0,
        eval_places: int = 1,
        versions_stay: bool = False,
    ) -> None:
        self._rollout = rollout
        self._make_backend = make_backend
        self._prompt_for = prompt_for
        self._sampling = sampling
        self._segment_len = segment_len
        self._score = score
        self._score_group = score_group
        self._teacher = teacher
        self._make_episode = make_episode or (lambda prompt: generate_once)
        self._decode = decode or (lambda ids: "")
        self._keep_decoded = keep_decoded
        self._pool_facts = f": {pool_facts}" if pool_facts else ""
        self._audit_share = audit_share
        self._eval_places = eval_places
        self._versions_stay = versions_stay
        self._evaluation: dict[str, asyncio.Task[list[Row]]] = {}  # of each set, by its name
        self._rescoring: Rescoring | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._last_taken: list[Group] = []
        self._check_alive = check_alive or (lambda: None)
        self._on_outcome = on_outcome or (lambda outcome: None)
        # True: a frozen request continues under a newer version
        self._freezes = rollout.pause_generation_mode in ("in_place", "retract")

        self._loop = asyncio.new_event_loop()
        self._changed = self._loop.create_future()  # done and replaced at every change
        self._backend: RolloutBackend | None = None
        self._version = start_rollout
        self._buffer = GroupBuffer(rollout, start_rollout=start_rollout)
        self._items: deque[RolloutItem] = deque()  # to be sent
        self._tasks: dict[tuple[int, int], set[asyncio.Task[None]]] = {}
        self._scoring: set[int] = set()  # ids of rollouts that lack only teacher and reward
        self._rates = Rates()
        self._in_flight = 0  # places taken, each for one rollout's requests
        self._going_on = 0  # resumed rollouts that wait for a place in flight
        self._evaluating = 0  # places taken by an evaluation, beside those of ``_in_flight``
        self._to_evaluate = 0  # answers of an evaluation that wait for a place
        # retracted rollouts that keep their place and wait for others to end
        self._short_of_room = 0
        self._pauses = 0  # weight updates under way: nothing is sent
        self._frozen = False  # the servers were told to pause
        self._aborting = False  # requests are aborted by an update, to be resumed after it
        self._error: BaseException | None = None
        self._closing = False
        if state is not None:
            for group in self._buffer.restore(state, prompt_for):
                self._add_items(group)
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._thread.start()

    # ---- the training thread's side ------------------------------------------------------------

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """Wait until enough groups are complete; return one rollout's, in order of group id.

        ``on_wait(stats)`` is called about five times a second meanwhile.  Raises the producer's
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

    def rescored(self) -> RescoredRollout | None:
        """All that was computed again of the last batch; None without ``audit_share``.

        Waits a limited time for what is under way.
        """
        return self._call(self._rescored())

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
        """Counts for a live display; tokens_per_s is the rate of the last ten seconds."""
        return self._call(self._stats())

    @property
    def failure(self) -> BaseException | None:
        """The first error of the producer, None while there is none."""
        return self._call(self._failure()) if self._thread.is_alive() else self._error

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
                    self._check_alive()
                if on_wait is not None:
                    on_wait(self.stats())
            future.result()
        finally:
            future.cancel()

    # ---- the loop: calls of the training thread --------------------------------------------------

    def _run(self) -> None:
        self._loop.call_soon(self._start)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self) -> None:
        try:
            backend = self._make_backend()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._fail(error)
        else:
            if self._audit_share:
                self._measuring = self._loop.create_task(self._measure_noise(backend))
            else:
                self._backend = backend
        self._advance()

    async def _measure_noise(self, backend: RolloutBackend) -> None:
        """Measure the servers' rounding, and then let generation begin."""
        self._rescoring = Rescoring(
            self._rollout,
            backend,
            self._audit_share,
            self._rates,
            versions_stay=self._versions_stay,
        )
        try:
            first = self._buffer.next_group
            prompts = [self._prompt_for(first + i) for i in range(self._rollout.rollout_batch_size)]
            await self._rescoring.measure_noise(prompts, self._sampling, self._version)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._fail(error)
        finally:
            self._backend = backend
        self._advance()

    async def _batch_ready(self, rollout_id: int) -> None:
        rollout, buffer = self._rollout, self._buffer
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
            await self._until(lambda: buffer.ready() == rollout.rollout_batch_size)
        finally:
            self._rates.waiting_s += time.monotonic() - began

    async def _take(self) -> list[list[Scored]] | None:
        """Take a rollout's groups; None if an older group has been submitted again meanwhile."""
        if self._buffer.ready() < self._rollout.rollout_batch_size:
            return None
        groups = self._last_taken = self._buffer.take()
        self._expire()
        if self._buffer.next_rollout == self._rollout.num_rollout:  # no rollout is left
            self._items.clear()
            self._cancel(*self._tasks)
        self._log_outcomes()
        self._advance()
        return [group.scored() for group in groups]

    async def _begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        assert not self._evaluation, "the evaluation before was not taken"
        over = self._buffer.next_rollout == self._rollout.num_rollout  # nothing is left to generate
        places = self._rollout.max_concurrency if over else self._eval_places
        room = _EvaluationRoom(self, places)
        for asked in sets:
            task = self._loop.create_task(self._evaluate(asked, self._version, room, places))
            task.add_done_callback(lambda _: self._advance())
            self._evaluation[asked.name] = task

    async def _evaluate(
        self, asked: EvalSet, version: int, room: _EvaluationRoom, places: int
    ) -> list[Row]:
        await self._until(lambda: self._backend is not None)
        return await evaluate(asked, self._backend, version, room, places)

    @property
    def _evaluation_done(self) -> bool:
        return all(task.done() for task in self._evaluation.values())

    async def _take_evaluation(self) -> dict[str, list[Row] | Exception]:
        tasks, self._evaluation = self._evaluation, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {name: _outcome(task) for name, task in tasks.items()}

    async def _pause(self) -> None:
        """Stop sending, and drain, freeze or abort the requests in flight."""
        mode = self._rollout.pause_generation_mode
        try:
            if mode != "drain":  # draining leaves time enough for what is computed again
                await self._rescored_beside_generation()
        finally:
            self._pauses += 1
        await self._until(lambda: self._evaluation_done)
        self._expire()
        await self._until(lambda: self._backend is not None)
        self._raise_failure()
        if self._freezes:
            await self._end_rescoring()
            self._frozen = True
            await self._backend.pause_generation(mode)
        elif mode == "abort":
            await self._end_rescoring()  # an abort ends these too
            self._aborting = True
            while self._in_flight:
                # repeated: an abort misses a request that is still on its way to the server
                await self._backend.abort()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_EVERY_S):
                        await self._until(lambda: self._in_flight == 0)
        else:
            await self._until(lambda: self._in_flight == 0)
            await self._end_rescoring()

    async def _rescored_beside_generation(self) -> None:
        """Wait a little for what is computed again, while tokens are generated beside it."""
        under_way = [] if self._rescoring is None else self._rescoring.under_way
        for task in under_way:
            task.add_done_callback(lambda _: self._advance())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AWAITED_S):
                await self._until(
                    lambda: not self._in_flight or all(task.done() for task in under_way)
                )

    async def _end_rescoring(self) -> None:
        if self._rescoring is not None:
            await self._rescoring.close(idle=self._in_flight == 0 and not self._closing)

    async def _thaw(self) -> None:
        if self._frozen:
            await self._backend.continue_generation()
            self._frozen = False

    async def _go_on(self) -> None:
        await self._thaw()
        self._aborting = False
        self._pauses -= 1
        if self._rescoring is not None and not self._pauses:
            self._rescoring.reopen()
        self._advance()

    async def _set_version(self, version: int) -> None:
        assert version >= self._version, f"weight version {version} after {self._version}"
        self._version = version
        self._advance()

    async def _resume(self) -> None:
        self._pauses = 0
        self._frozen = self._aborting = False  # the paused servers have ended
        if self._rescoring is not None:
            self._rescoring.reopen()
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

    async def _rescored(self) -> RescoredRollout | None:
        if self._rescoring is None:
            return None
        return await self._rescoring.of_groups(self._last_taken)

    async def _stats(self) -> dict[str, Any]:
        return {
            "weight_version": self._version,
            "in_flight": self._in_flight,
            "submitted_groups": self._buffer.next_group,
            "buffered_groups": self._buffer.complete_groups,
            "outcomes": dict(self._buffer.outcomes),
            **self._rates.stats(),
        }

    async def _failure(self) -> BaseException | None:
        return self._error

    async def _close(self) -> None:
        self._closing = True
        self._buffer.close()
        self._log_outcomes()
        running = [task for tasks in self._tasks.values() for task in tasks]
        self._cancel(*self._tasks)
        if self._measuring is not None:
            self._measuring.cancel()
            running.append(self._measuring)
        await self._take_evaluation()
        await asyncio.gather(*running, return_exceptions=True)
        await self._end_rescoring()
        if self._backend is not None:
            with contextlib.suppress(EngineError):  # the loop ends in the middle of an update
                await self._thaw()
            await self._backend.aclose()
        if self._teacher is not None:
            await self._teacher.aclose()

    # ---- the loop: its own work ------------------------------------------------------------------

    def _advance(self) -> None:
        """Send all rollouts that may be sent, and wake all waiters; called after every change."""
        try:
            while (item := self._next_item()) is not None:
                turns = _Turns(self, item)
                name = f"sample {item.sample_id} of prompt {item.group.prompt.prompt_id}"
                task = self._loop.create_task(self._one(item, turns), name=name)
                self._tasks.setdefault(item.key, set()).add(task)
                task.add_done_callback(partial(self._forget, item.key, turns))
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._error = self._error or error
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    async def _until(self, done: Callable[[], bool], *, though_failed: bool = False) -> None:
        """Wait for a condition; raise the producer's failure unless ``though_failed``."""
        while not done():
            if not though_failed:
                self._raise_failure()
            await asyncio.shield(self._changed)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._advance()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _next_item(self) -> RolloutItem | None:
        """The next rollout to send, with its place in flight taken; None while it must wait."""
        if self._error is not None or self._closing or self._backend is None or self._pauses:
            return None
        # a resumed rollout comes before a new one, and so does one that was retracted
        if self._short_of_room:
            return None
        waiting = self._going_on + self._to_evaluate
        if self._in_flight + self._evaluating + waiting >= self._rollout.max_concurrency:
            return None
        while True:
            if not self._items and not self._submit_group():
                return None
            item = self._items.popleft()
            if self._buffer.current(*item.key) is item.group:
                break
        if item.group.started_version is None:
            item.group.started_version = self._version
        self._take_place()
        return item

    def _submit_group(self) -> bool:
        buffer = self._buffer
        if buffer.room(self._version) <= 0:
            return False
        new = self._prompt_for(buffer.next_group) if buffer.wants_prompt() else None
        self._add_items(buffer.submit(new))
        return True

    def _add_items(self, group: Group) -> None:
        for place in range(self._rollout.n_samples_per_prompt):
            if place not in group.samples:
                number = group.group_id * self._rollout.n_samples_per_prompt + place
                sample_id = number * self._rollout.samples_per_episode
                episode = self._make_episode(group.prompt)
                self._items.append(
                    RolloutItem(group, group.attempt, place, sample_id, self._sampling, episode)
                )

    async def _one(self, item: RolloutItem, turns: _Turns) -> None:
        """Make one rollout, score it, and put it into its group; an error becomes the failure."""
        try:
            await self._make(item, turns)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the producer
            self._fail(error)
        finally:
            self._scoring.discard(item.sample_id)
            self._advance()

    async def _make(self, item: RolloutItem, turns: _Turns) -> None:
        group = item.group
        try:
            samples, own = await item.episode(
                turns, group.prompt, sampling=item.sampling, sample_id=item.sample_id
            )
        finally:
            turns.release()
        if self._rescoring is not None:
            unbroken = turns.unbroken
            self._rescoring.finished(group, item.place, samples[-1], unbroken, self._version)
        if not self._keep_decoded:
            samples = [replace(sample, decoded=(), decoded_kept=()) for sample in samples]
        self._rates.finished(samples)
        self._scoring.add(item.sample_id)
        if self._teacher is not None:
            samples = list(await asyncio.gather(*map(self._teacher, samples)))
        if self._score_group is not None:
            (group.unscored[item.place],) = samples
            if len(group.unscored) + len(group.samples) < self._rollout.n_samples_per_prompt:
                return  # the group's last rollout has it scored
        if self._score_group is not None:
            places = await self._rewards_of(group)
        else:
            places = {item.place: [scored(s, await self._reward(s, own)) for s in samples]}
        if self._buffer.current(*item.key) is group:
            if self._score_group is not None:
                group.samples.clear()
            for place, of_place in places.items():
                self._buffer.finish(group, place, of_place)
            self._log_outcomes()

    async def _rewards_of(self, group: Group) -> dict[int, list[Scored]]:
        """Score a group as a whole, also samples that an earlier run has scored; by place."""
        earlier = {place: before[0][0] for place, before in group.samples.items()}
        samples = dict(sorted((earlier | group.unscored).items()))
        rewards = await self._score_group(list(samples.values()))
        return {p: [scored(s, reward)] for (p, s), reward in zip(samples.items(), rewards)}

    async def _reward(self, sample: RolloutSample, own: float | None) -> float:
        """Return the episode's ``own`` reward, or if that is None the reward of the text."""
        if own is not None:
            return own
        return 0.0 if self._score is None else await self._score(sample)

    def _take_place(self) -> None:
        self._in_flight += 1
        self._rates.in_flight(self._in_flight)

    def _leave_place(self) -> None:
        self._in_flight -= 1
        self._rates.in_flight(self._in_flight)
        self._advance()

    async def _place_to_go_on(self) -> None:
        """Wait for a place in flight, for a rollout that is resumed."""
        self._going_on += 1
        limit = self._rollout.max_concurrency
        try:
            await self._until(
                lambda: not self._pauses and self._in_flight + self._evaluating < limit,
                though_failed=True,
            )
            self._take_place()
        finally:
            self._going_on -= 1

    async def _room_in_the_pools(self) -> None:
        """Wait until half of the places in flight are free; nothing new is sent meanwhile.

        A server retracts the request with the fewest tokens first.  If a retracted request were sent
        again among as many others, it would have the fewest once more (seen 42 times in a row).  After
        the wait, requests that are sent later have fewer tokens than it.  Pools that hold half of what all
        places need have room for it then.
        """
        half = max(1, self._rollout.most_in_flight // 2)
        self._short_of_room += 1
        try:
            await self._until(
                lambda: not self._frozen
                and self._in_flight + self._evaluating - self._short_of_room < half,
                though_failed=True,
            )
        finally:
            self._short_of_room -= 1
            self._advance()

    def _expire(self) -> None:
        """Drop or regenerate the groups that would be too stale for the next rollout."""
        stale = self._buffer.expire(self._buffer.next_rollout)
        self._cancel(*((group.group_id, group.attempt) for group in stale))
        self._log_outcomes()

    def _cancel(self, *keys: tuple[int, int]) -> None:
        for key in keys:
            for task in self._tasks.get(key, ()):
                task.cancel()

    def _forget(self, key: tuple[int, int], turns: _Turns, task: asyncio.Task[None]) -> None:
        turns.release()  # a task that was cancelled before it began still holds its place
        left = self._tasks[key]
        left.discard(task)
        if not left:
            del self._tasks[key]

    def _log_outcomes(self) -> None:
        for outcome in self._buffer.drain_log():
            self._on_outcome(outcome)


def _outcome(task: asyncio.Task[list[Row]]) -> list[Row] | Exception:
    if task.cancelled():
        return EvaluationEnded("it was given up before its end")
    error = task.exception()
    if error is None:
        return task.result()
    return error if isinstance(error, Exception) else EvaluationEnded(repr(error))


class _EvaluationRoom:
    """A place in flight for each answer of an evaluation, ``places`` at once at most.

    Answers that wait for a place come before new rollouts; otherwise every freed place would go to a
    rollout.
    """

    def __init__(self, producer: Producer, places: int) -> None:
        self._producer = producer
        self._share = asyncio.Semaphore(places)

    async def __aenter__(self) -> None:
        p = self._producer
        limit = p._rollout.max_concurrency
        await self._share.acquire()
        p._to_evaluate += 1
        try:
            await p._until(
                lambda: not p._short_of_room and p._in_flight + p._evaluating < limit,
                though_failed=True,
            )
            p._evaluating += 1
        except BaseException:
            self._share.release()
            raise
        finally:
            p._to_evaluate -= 1

    async def __aexit__(self, *_exc: object) -> None:
        self._producer._evaluating -= 1
        self._share.release()
        self._producer._advance()


class _Turns:
    """The turns of one rollout (a ``Generate``); its first place in flight is already taken."""

    def __init__(self, producer: Producer, item: RolloutItem) -> None:
        self._producer = producer
        self._item = item
        self._held = True
        self._retracted = 0  # answers in a row that a server retracted
        self.unbroken = Unbroken()

    def release(self) -> None:
        """Give the place in flight back if it is still held."""
        if self._held:
            self._held = False
            self._producer._leave_place()

    async def __call__(
        self, resume_from: RolloutSample | None = None, turn_limit: int | None = None
    ) -> RolloutSample:
        """Generate one answer, resumed after every update that aborted it.

        Under R3 the answer to a request that a server retracted is thrown away, and the same tokens
        are asked for again.  Earlier answers of the rollout came with their own rows and stay.

        The place in flight is kept between the segments of an answer, and given back during an
        update.
        """
        p, item = self._producer, self._item
        sample = resume_from or stitch.begin(
            item.group.prompt, sample_id=item.sample_id, group_id=item.group.group_id
        )
        version = p._version
        while True:
            if not self._held:
                await p._place_to_go_on()
                self._held = True
            if self._retracted:
                await p._room_in_the_pools()
            limit = stitch.shortest(turn_limit, p._segment_len)
            if not p._versions_stay:
                version = p._version
            request = stitch.next_request(
                sample,
                item.sampling,
                limit=limit,
                weight_version=version,
                exact_version=not p._freezes,
            )
            if p._rescoring is not None and p._freezes and not sample.loss_mask.any():
                p._rescoring.sent(item.group, item.place, request)
            goes_on, began = False, time.monotonic()
            try:
                segment = await p._backend.generate(request)
                self._check_newest(segment.weight_versions.max(initial=-1))
                again = self._is_retracted(segment)
                if again:
                    segment = stitch.thrown_away(segment)
                self.unbroken.answered(request, segment)
                sample = stitch.extend(sample, segment)
                waited_s = sample.generation_s + time.monotonic() - began
                sample = replace(sample, generation_s=waited_s)
                count = len(segment.token_ids)
                if turn_limit is not None:
                    turn_limit -= count
                left = stitch.shortest(stitch.tokens_left(sample, item.sampling), turn_limit)
                unfinished = again or stitch.is_cut(segment, limit, left)
                # checked while the place is held: once it is given back, the update may end
                interrupted = p._aborting and (unfinished or segment.finish_reason == "abort")
                # a frozen server would accept the request, and compute it from the cache of older weights
                interrupted |= p._frozen and again
                goes_on = unfinished and not interrupted
            finally:
                if not goes_on:
                    self.release()
            p._rates.tokens(count)
            p._rates.resumed += interrupted and not again
            if not (interrupted or goes_on):
                break
            if left <= 0:
                sample = replace(sample, finish_reason="length")
                break
        text = p._decode(sample.token_ids[sample.prompt_len :].tolist())
        return replace(sample, text=text)

    def _is_retracted(self, segment: Segment) -> bool:
        """Count an answer that a server retracted; True if it must not be kept.

        Its rows come from the forwards that computed the request again, its log-probs from the first.
        Raises EngineError after too many in a row.
        """
        p, item = self._producer, self._item
        p._rates.retracted += segment.num_retractions > 0
        if segment.num_retractions == 0 or segment.rows is None:
            self._retracted = 0
            return False
        if p._rollout.retraction_policy == "accept":
            return False
        self._retracted += 1
        if self._retracted == _MAX_RETRACTIONS:
            raise EngineError(
                f"sample {item.sample_id} (prompt {item.group.prompt.prompt_id!r}) was retracted by"
                f" its server {_MAX_RETRACTIONS} times in a row{p._pool_facts}; lower"
                " --rollout-max-concurrency, or give the servers more memory"
                " (--sglang-mem-fraction-static, --sglang-max-total-tokens)"
            )
        return True

    def _check_newest(self, newest: int) -> None:
        given = self._producer._version
        if newest > given:
            raise ValueError(
                f"sample {self._item.sample_id}: a token of weight version {newest}, the servers "
                f"were given {given} at most"
            )

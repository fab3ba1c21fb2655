"""Run an evaluation in the producer's event loop, while rollouts are generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

from r3train.generation.eval_sets import EvalSet, EvaluationEnded, Room, Row, evaluate
from r3train.generation.shared import Shared, Slots


class EvaluationRunner:
    """Evaluates one weight version at a time, every set in a task of its own."""

    def __init__(self, shared: Shared, slots: Slots) -> None:
        self._shared = shared
        self._slots = slots
        self._tasks: dict[str, asyncio.Task[list[Row]]] = {}  # of each set, by its name

    @property
    def is_done(self) -> bool:
        """True when no set is being evaluated."""
        return all(task.done() for task in self._tasks.values())

    @property
    def tasks(self) -> list[asyncio.Task[list[Row]]]:
        """The tasks of the evaluation that was not taken yet."""
        return list(self._tasks.values())

    def begin(self, sets: Sequence[EvalSet], most: int, episodes: int) -> None:
        """Begin to evaluate the version that the servers hold, with at most ``most`` requests in flight.

        episodes: the most that are under way at once.
        """
        assert not self._tasks, "the evaluation before was not taken"
        room, begun = partial(self._slot, asyncio.Semaphore(most)), asyncio.Semaphore(episodes)
        for eval_set in sets:
            task = self._shared.loop.create_task(
                self._evaluate(eval_set, self._shared.version, room, lambda: begun)
            )
            task.add_done_callback(lambda _: self._shared.changed())
            self._tasks[eval_set.name] = task

    async def take(self) -> dict[str, list[Row] | Exception]:
        """End the evaluation; return the rows of each set, or its error.

        A set that is not complete is given up: its error is EvaluationEnded.
        """
        tasks, self._tasks = self._tasks, {}
        outcomes = await cancelled(*tasks.values())
        given_up = EvaluationEnded("it was given up before its end")
        return {
            name: given_up if isinstance(found, asyncio.CancelledError) else found
            for name, found in zip(tasks, outcomes)
        }

    async def _evaluate(
        self, eval_set: EvalSet, version: int, room: Room, episodes: Room
    ) -> list[Row]:
        await self._shared.until(lambda: self._shared.backend is not None)
        return await evaluate(eval_set, self._shared.backend, version, room, episodes=episodes)

    @contextlib.asynccontextmanager
    async def _slot(self, share: asyncio.Semaphore) -> AsyncIterator[None]:
        """Hold a slot for a call, as many at once as the evaluation's ``share`` has."""
        async with share:
            await self._slots.wait_for_evaluation_slot()
            with self._slots.evaluating():
                yield


async def cancelled(*tasks: asyncio.Task) -> list:
    """Cancel tasks, and return the result or the error of each."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)

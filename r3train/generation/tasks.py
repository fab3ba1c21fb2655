"""Rollouts to make, and the asyncio tasks of those under way, by the group that they are for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from r3train.generation.episode import Episode
from r3train.generation.buffer import Group

Key = tuple[int, int]  # group id, attempt


@dataclass(slots=True)
class RolloutItem:
    """One rollout to make, or to go on with: place ``place`` of one attempt at a group."""

    group: Group
    attempt: int
    place: int
    sample_id: int
    episode: Episode

    @property
    def key(self) -> Key:
        return self.group.group_id, self.attempt


class RolloutTasks:
    """Starts and cancels tasks; everything here is called in the loop."""

    def __init__(self) -> None:
        self._of: dict[Key, set[asyncio.Task]] = {}
        self._group: asyncio.TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tasks may be started inside; those that still run at its end are cancelled.

        Raises the first failure as itself, not as a group.
        """
        try:
            async with asyncio.TaskGroup() as self._group:
                yield
                raise _Closing
        except BaseExceptionGroup as failures:
            # the condition is asked of groups too, and a group that meets it comes back whole
            ours = (_Closing, BaseExceptionGroup)
            real = failures.subgroup(lambda error: not isinstance(error, ours))
            if real is not None:
                raise _first_leaf(real) from None

    def start(self, key: Key, work: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None, "a task was started outside running()"
        task = self._group.create_task(work)
        self._of.setdefault(key, set()).add(task)
        task.add_done_callback(lambda done: self._forget(key, done))

    def _forget(self, key: Key, task: asyncio.Task) -> None:
        left = self._of.get(key, set())
        left.discard(task)
        if not left:
            self._of.pop(key, None)

    def cancel(self, key: Key) -> None:
        for task in self._of.get(key, set()).copy():
            task.cancel()

    def cancel_all(self) -> None:
        for key in list(self._of):
            self.cancel(key)


class _Closing(Exception):
    """Cancels the task group on close."""


def _first_leaf(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""An event loop on a thread of its own, for environments: a step that blocks it holds up no one else."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from r3train.plugs import exit_held, quoted

_PING_S = 1.0


class GuestLoop:
    """Runs code of the user in turns, as asyncio does; the thread is a daemon and ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    async def ask(self, call: Callable[[], Any], what: str, limit_s: float) -> Any:
        """Return what ``call``, a function or an async one, returns within ``limit_s`` seconds.

        Raises ValueError beginning with ``what`` if it takes longer, raises, or exits.
        """
        own = asyncio.current_task()
        try:
            async with asyncio.timeout(limit_s) as bound:
                with exit_held():
                    value, error = await self._run(_outcome(call, what))
        except TimeoutError:
            if not bound.expired():
                raise
            blocks = await self._blocked_by()
            raise ValueError(f"{what} took longer than --environment-timeout-s {limit_s:g}{blocks}")
        if error is not None:
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise error  # the rollout itself is cancelled
            raise ValueError(f"{what} raised {quoted(error)}") from error
        return value

    async def _run(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _blocked_by(self) -> str:
        """Name the step that keeps the loop from all others; "" where it runs."""
        try:
            async with asyncio.timeout(_PING_S):
                await self._run(asyncio.sleep(0))
            return ""
        except TimeoutError:
            running = asyncio.current_task(self._loop)
            name = running.get_name() if running is not None else "a step"
            return f": {name} blocks the event loop; await what takes long, or run it in a thread"


async def _outcome(call: Callable[[], Any], what: str) -> tuple[Any, BaseException | None]:
    """The value and the error of a call; an error that left this task could end the loop."""
    task = asyncio.current_task()
    if task is not None:
        task.set_name(what)
    try:
        value = call()
        return (await value if inspect.isawaitable(value) else value), None
    except GeneratorExit:
        raise
    except BaseException as error:  # sys.exit too
        return None, error

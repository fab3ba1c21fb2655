"""An event loop on a thread of its own, for environments: a step that blocks it holds up no one else."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import warnings
from asyncio import selector_events
from collections.abc import Callable
from typing import Any

from r3train.patches import patch
from r3train.user_code import quoted
from r3train.user_frames import place

_BLOCKS = "blocks the event loop; await what takes long, or run it in a thread"


class EnvironmentLoop:
    """Runs user code one call after another, as asyncio does; the thread is a daemon and ends with the process.

    limit: the flag of its time-outs, for errors.
    """

    def __init__(self, limit: str = "--environment-timeout-s") -> None:
        self._limit = limit
        self._loop = asyncio.new_event_loop()
        self._begun = 0  # calls, so far
        let_collected_transports_end()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    async def ask(self, call: Callable[[], Any], what: str, limit_s: float) -> Any:
        """Return what ``call``, a function or an async one, returns within ``limit_s`` seconds of its begin.

        Raises ValueError beginning with ``what`` if it takes longer, raises, or exits, and where another call
        keeps it from its begin for as long.
        """
        asker, current_task = asyncio.get_running_loop(), asyncio.current_task()
        begun, answer = asyncio.Event(), asker.create_future()

        def call_asker(do: Callable[..., None], *values: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the asker has ended
                asker.call_soon_threadsafe(do, *values)

        def ends(outcome: tuple[Any, BaseException | None]) -> None:
            if not answer.done():
                answer.set_result(outcome)

        async def run() -> None:
            self._begun += 1
            call_asker(begun.set)
            call_asker(ends, await _outcome(call, what))

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            await self._wait_for_begin(begun, what, limit_s)
            async with asyncio.timeout(limit_s) as bound:
                value, error = await answer
        except TimeoutError:
            if not bound.expired():
                raise
            late = f"{what} took longer than {self._limit} {limit_s:g}"
            blocks = f": it {_BLOCKS}" if self._holder() == what else ""
            raise ValueError(late + blocks) from None
        finally:
            running.cancel()
        if error is not None:
            if (
                isinstance(error, asyncio.CancelledError)
                and current_task is not None
                and current_task.cancelling()
            ):
                raise error  # the episode itself is cancelled
            raise ValueError(f"{what} raised {quoted(error)}{place(error)}") from error
        return value

    async def _wait_for_begin(self, begun: asyncio.Event, what: str, limit_s: float) -> None:
        """Wait for the turn of a call: as long as others begin, each within the limit."""
        before = -1
        while not begun.is_set():
            if before == self._begun:
                raise ValueError(
                    f"{what} waited longer than {self._limit} {limit_s:g}:"
                    f" {self._holder() or 'another call'} {_BLOCKS}"
                )
            before = self._begun
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(begun.wait(), limit_s)

    def _holder(self) -> str:
        """The name of the call that the loop is in; "" between calls."""
        running = asyncio.current_task(self._loop)
        return running.get_name() if running is not None else ""


def let_collected_transports_end() -> None:
    """Have a transport that garbage collection takes leave the loop alone from then on.

    Its socket closes there, and another connection may have the number at once.  A client that user code left
    open is collected with it and closes it later, in whichever loop the collector ran: asyncio would then stop
    watching the number, and the other connection wait for ever.
    """
    patch(
        selector_events._SelectorTransport,
        "__del__",
        _collected,
        expects="(self, _warn=<built-in function warn>)",
        why="a client that user code left open would end the waiting of another's connection when it is collected",
    )


def _collected(self: Any, _warn: Callable[..., None] = warnings.warn) -> None:
    if self._sock is not None:
        _warn(f"unclosed transport {self!r}", ResourceWarning, source=self)
        self._closing = True
        self._conn_lost += 1
        self._sock.close()


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

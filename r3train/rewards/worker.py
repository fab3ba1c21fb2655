"""The child process that runs a reward function: ``python -m r3train.rewards.worker SOCKET_FD``.

Parent and child speak over a socket: eight bytes of length, then a pickle.  The parent's first
message is a ``Task``, answered by None or by an error as text.  Every further one is (number,
arguments), answered by (number, None, value) or (number, error as text, None), in any order: async
functions run in one event loop, others in a thread each.  Whatever the function prints goes to
stderr.  The process ends with its parent, or when the parent kills it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3train.plugs import import_plug, quoted

LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Task:
    """The function of a worker, as module:object, and what it needs to be found."""

    function: str
    parent: int  # its process id
    path: tuple[str, ...]  # of imports


def packed(message: Any) -> bytes:
    """A message as the socket carries it."""
    content = pickle.dumps(message)
    return LENGTH.pack(len(content)) + content


def taken(content: bytearray) -> Any:
    """Take the first message out of what was read so far; None while it is not whole."""
    if len(content) < LENGTH.size:
        return None
    end = LENGTH.size + LENGTH.unpack_from(content)[0]
    if len(content) < end:
        return None
    message = pickle.loads(content[LENGTH.size : end])
    del content[:end]
    return message


async def _read(reader: asyncio.StreamReader) -> Any:
    """The next message; raises IncompleteReadError at the end of the stream."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def plain(value: Any) -> Any:
    """Numbers of any kind as float, in lists and tables of any kind; raises TypeError otherwise."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items() if _is_number(part)}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if hasattr(value, "tolist") and getattr(value, "ndim", 0):
        return plain(value.tolist())
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError("no number")
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        plain(value)
    except (TypeError, ValueError):
        return False
    return True


async def _serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    task: Task = await _read(reader)
    if os.getppid() != task.parent:  # it was gone before the kernel was asked to tell
        return
    sys.path[:] = task.path  # the function is found where the parent found it
    try:
        function = import_plug("reward", task.function)
    except ValueError as error:
        writer.write(packed((0, str(error), None)))
        await writer.drain()
        return
    writer.write(packed((0, None, None)))
    loop = asyncio.get_running_loop()
    calls: set[asyncio.Task[None]] = set()
    while True:
        try:
            number, arguments = await _read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        if inspect.iscoroutinefunction(function):
            call = loop.create_task(_call(function, number, arguments, writer))
            calls.add(call)
            call.add_done_callback(calls.discard)
        else:
            in_thread = (loop, function, number, arguments, writer)
            threading.Thread(target=_call_in_thread, args=in_thread, daemon=True).start()


async def _call(
    function: Callable[..., Any], number: int, arguments: Any, writer: asyncio.StreamWriter
) -> None:
    try:
        answer = _answer(number, await function(*arguments))
    except BaseException as error:  # sys.exit and CancelledError of a user's function too
        answer = _failed(number, error)
    writer.write(answer)


def _call_in_thread(
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., Any],
    number: int,
    arguments: Any,
    writer: asyncio.StreamWriter,
) -> None:
    try:
        value = function(*arguments)
        # a function that is not async itself may return a coroutine
        if inspect.isawaitable(value):
            value = asyncio.run_coroutine_threadsafe(_awaited(value), loop).result()
        answer = _answer(number, value)
    except BaseException as error:  # sys.exit too
        answer = _failed(number, error)
    loop.call_soon_threadsafe(writer.write, answer)


async def _awaited(value: Any) -> Any:
    return await value


def _answer(number: int, value: Any) -> bytes:
    try:
        return packed((number, None, plain(value)))
    except (TypeError, ValueError):
        return packed((number, f"must be a finite number, got {quoted(value)}", None))


def _failed(number: int, error: BaseException) -> bytes:
    return packed((number, f"raised {type(error).__name__}: {quoted(error, str)}", None))


def main() -> None:
    """Serve until the parent closes the socket or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(2, 1)
    asyncio.run(_serve(int(sys.argv[1])))
    os._exit(0)  # threads of calls may still be running


if __name__ == "__main__":
    main()

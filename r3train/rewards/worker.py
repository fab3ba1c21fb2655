"""The processes that run a reward function: ``python -m r3train.rewards.worker SOCKET_FD PARENT_PID``.

There are two.  The first runs nothing of the user's: it ends the second, which runs the function, and
everything that this has started, children that left the session too, when its parent is gone, at SIGTERM,
and when the second ends.  Then it ends in the same way as the second.

Parent and child speak over a socket: eight bytes of length, then a message.  The parent's messages are
pickles.  The first is a ``Task``, answered by None or by an error as text.  Every further one is (number,
arguments), answered by [number, null, value] or [number, error as text, frames as text], in any order: async
functions run in one event loop, others in a thread each.  Answers are JSON: the parent unpickles nothing,
for a function may run what a model wrote.  Whatever the function prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import json
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

from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.process_tree import adopt_orphans, keep, signal_when_parent_ends
from r3train.user_code import import_user_code, quoted
from r3train.user_frames import place, user_frames

LENGTH = struct.Struct("!Q")
# of one answer; the numbers of a group take a small part of it
_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """The function of a worker, as module:object, and what it needs to be found."""

    function: str
    path: tuple[str, ...]  # of imports


def packed(message: Any) -> bytes:
    """A message of the parent's as the socket carries it."""
    return framed(pickle.dumps(message))


def framed(content: bytes) -> bytes:
    """Bytes behind their length, as the other end of a pipe reads them."""
    return LENGTH.pack(len(content)) + content


def take_answer(content: bytearray) -> tuple[int, str | None, Any] | None:
    """Take the first answer out of what was read so far: number, error and value; None while it is not whole.

    Raises ValueError for what is no answer: code of the user can write to the socket.
    """
    if len(content) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(content)
    if length > _ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes, expected at most {_ANSWER_BYTES}")
    end = LENGTH.size + length
    if len(content) < end:
        return None
    try:
        answer = json.loads(content[LENGTH.size : end])
    except RecursionError:
        raise ValueError("an answer of too many levels") from None
    del content[:end]
    kinds = [type(part) for part in answer[:2]] if isinstance(answer, list) else []
    if kinds not in ([int, str], [int, type(None)]) or len(answer) != 3:
        raise ValueError(f"the answer {quoted(answer)}, expected [number, error, value]")
    number, error, value = answer
    return number, error, value


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
    sys.path[:] = task.path  # the function is found where the parent found it
    try:
        function = import_user_code("reward", task.function)
    except ValueError as error:
        writer.write(_reply(0, str(error), None))
        await writer.drain()
        return
    writer.write(_reply(0, None, None))
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
        answer = _answer(number, await _called(function, arguments))
    except BaseException as error:  # sys.exit and CancelledError of a user's function too
        answer = _failed(number, error)
    writer.write(answer)


def _called(function: Callable[..., Any], arguments: Any) -> Any:
    """Call a function with a tuple of arguments, or with a table of them by name."""
    return function(**arguments) if isinstance(arguments, dict) else function(*arguments)


def _call_in_thread(
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., Any],
    number: int,
    arguments: Any,
    writer: asyncio.StreamWriter,
) -> None:
    try:
        value = _called(function, arguments)
        # a function that is not async itself may return a coroutine
        if inspect.isawaitable(value):
            value = asyncio.run_coroutine_threadsafe(_awaited(value), loop).result()
        answer = _answer(number, value)
    except BaseException as error:  # sys.exit too
        answer = _failed(number, error)
    loop.call_soon_threadsafe(writer.write, answer)


async def _awaited(value: Any) -> Any:
    return await value


def _reply(number: int, error: str | None, value: Any) -> bytes:
    return framed(json.dumps([number, error, value]).encode())


def _answer(number: int, value: Any) -> bytes:
    try:
        return _reply(number, None, plain(value))
    except (TypeError, ValueError):
        return _reply(number, f"must be a finite number, got {quoted(value)}", None)


def _failed(number: int, error: BaseException) -> bytes:
    """The answer of a call that has failed; its value is the user's part of the traceback."""
    text = f"raised {type(error).__name__}: {quoted(error, str)}{place(error)}"
    return _reply(number, text, "".join(user_frames(error).format()))


def main() -> None:
    """Serve until the parent closes the socket or is gone."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a handler
    adopt_orphans()
    signal_when_parent_ends(signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the kernel was asked to tell
        return
    run_state = os.getpid()
    if worker := os.fork():
        os.close(fd)
        keep(worker)
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != run_state:
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.dup2(2, 1)
    declare_ops_for_imports()  # the function may import transformers
    asyncio.run(_serve(fd))
    os._exit(0)  # threads of calls may still be running


if __name__ == "__main__":
    main()

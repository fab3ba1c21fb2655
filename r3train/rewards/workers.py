"""Processes that run reward functions, and calls into them, each with a limit that holds.

A function that holds the interpreter's lock, never returns or ends its process cannot be stopped
from inside.  Its process can.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from r3train.rewards.worker import Task, packed, take_answer

# importing the function's module may import much more
_START_S = 300.0
_EXIT_S = 1.0
# for the end of a process that has hundreds of children
_END_S = 30.0


class WorkerEnded(Exception):
    """The process ended in the middle of a call; its text says how."""


class CallFailed(Exception):
    """The function raised an error, or returned something else than numbers; its text says what.

    A note holds the function's own part of the traceback.
    """


class Workers:
    """Processes that run one function, as module:object, each at most ``calls`` times at once.

    Used in one event loop up to ``close``.  Processes start when they are needed.
    """

    def __init__(self, path: str, *, processes: int, calls: int) -> None:
        self._path, self._processes, self._calls = path, processes, calls
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to one event loop."""
        self._workers = [_Worker(self._path) for _ in range(self._processes)]
        self._free = asyncio.Semaphore(self._processes * self._calls)

    async def call(self, arguments: Any, *, timeout_s: float) -> Any:
        """Call the function, by position (a tuple) or by name (a table), and return its numbers.

        Raises TimeoutError after ``timeout_s``, waiting for a place and for the process' start not
        counted.  The process is ended then, or with ``close`` if other calls are in it.  Raises
        CallFailed and WorkerEnded.
        """
        async with self._free:
            worker = min(self._workers, key=lambda worker: worker.calls)
            worker.calls += 1
            try:
                await worker.start()
                async with asyncio.timeout(timeout_s):
                    return await worker.call(arguments)
            except TimeoutError:
                if worker.calls == 1:
                    worker.kill()
                raise
            finally:
                worker.calls -= 1

    def close(self) -> None:
        """End the processes and all that they have started, from any thread; another loop may begin anew."""
        workers = self._workers
        self._begin()
        for worker in workers:
            worker.kill()


class _Worker:
    """One process, or none until it is needed, and its end of the socket."""

    def __init__(self, path: str) -> None:
        self.calls = 0  # in it, or on their way
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self._count = 0

    async def start(self) -> None:
        """Start the process if there is none; raises CallFailed if the function is not there."""
        async with self._starting:
            if self._process is not None:
                return
            parent_socket, worker_socket = socket.socketpair()
            with worker_socket:
                arguments = (str(worker_socket.fileno()), str(os.getpid()))
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "r3train.rewards.worker", *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[worker_socket.fileno()],
                    start_new_session=True,  # Ctrl-C is ours to handle
                )
            parent_socket.setblocking(False)
            loop = asyncio.get_running_loop()
            self._stream = _Stream(self._process)
            self._transport, _ = await loop.create_connection(
                lambda: self._stream, sock=parent_socket
            )
            self._transport.write(packed(Task(self._path, tuple(sys.path))))
            try:
                async with asyncio.timeout(_START_S):
                    await self._stream.answer(0)
            except TimeoutError:
                self.kill()
                raise CallFailed(f"its process did not start in {_START_S:g} s") from None
            except BaseException:
                self.kill()
                raise

    async def call(self, arguments: Any) -> Any:
        """Send one call and wait for its answer."""
        stream, process = self._stream, self._process
        if process is None:
            raise WorkerEnded("its process was ended by another call's time-out")
        self._count += 1
        number = self._count
        self._transport.write(packed((number, arguments)))
        try:
            return await stream.answer(number)
        except WorkerEnded:
            if self._process is process:
                self.kill()
            raise

    def kill(self) -> None:
        """End the process and its children; the next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


class _Stream(asyncio.Protocol):
    """The parent's end of one process' socket: answers by their number."""

    _transport: asyncio.BaseTransport

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._content = bytearray()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ended: str | None = None

    async def answer(self, number: int) -> Any:
        """Wait for one answer; raises CallFailed, or WorkerEnded at the end of the process."""
        if self._ended is not None:
            raise WorkerEnded(self._ended)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    def data_received(self, data: bytes) -> None:
        """Take a part of the stream, and hand out the answers that are whole."""
        self._content += data
        while (answer := self._next()) is not None:
            number, error, value = answer
            future = self._answers.get(number)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                failed = CallFailed(error)
                if isinstance(value, str):
                    failed.add_note(value)
                future.set_exception(failed)

    def _next(self) -> tuple[int, str | None, Any] | None:
        if self._ended is not None:
            return None
        try:
            return take_answer(self._content)
        except ValueError as error:
            self._ended = f"wrote to the socket of its process: {error}"
            self._transport.abort()
            return None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, to close it where its other end misbehaves."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Fail every call that is left: the process has ended, or is ended here."""
        if self._ended is None:
            # its socket closes a little before its exit code is known
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self._ended = _cause_of_end(self._process.returncode)
        _kill(self._process)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(WorkerEnded(self._ended))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cause_of_end(code: int | None) -> str:
    """The way in which a process ended, from its exit code."""
    if code is not None and code < 0:
        return f"ended its process (signal {signal.Signals(-code).name})"
    return f"ended its process (exit code {code})"

"""SGLang's parsers in a process of their own: a text that takes them long holds up nobody else.

Some of their expressions take time that doubles with each argument: of a call with 30 arguments that was cut before
its end, the pythonic parser would think for an hour, and no thread of its process would run meanwhile.  Their
imports, 0.2 GB and half a million objects for every garbage collection, are not rank 0's either.

``python -m r3train.engine.parser_process`` is the process.  It ends with its pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, BinaryIO

from r3train.chat.base import Parse, Parsed
from r3train.engine.parsers import known_calls, make_parse, users_parse
from r3train.user_code import quoted
from r3train.cpu.torchvision_stub import declare_ops_for_imports

logger = logging.getLogger(__name__)

# CPU time of the process for one text: a sound call of 100,000 characters takes a tenth
LIMIT_S = 2.0
# Wall time, of a process that does not notice the limit; and of its start
_STUCK_S, _START_S = 60.0, 300.0
_LENGTH = struct.Struct("!I")
_NOT_HANDED = (
    "the tokenizer cannot be handed to the process of SGLang's parsers: {}; --agent-tool-call-parser none"
    " or module:function with --agent-reasoning-parser none needs no such process"
)


class Parser:
    """Reads the texts of answers as ``make_parse`` says, SGLang's part in a process; any event loop may ask.

    A text that takes longer than ``LIMIT_S`` there is content, as is one that no parser can read.  The user's
    own parser runs in the loop that asks.
    """

    def __init__(
        self, calls: str, reasoning: str, tokenizer: Any, template_kwargs: Mapping[str, Any]
    ) -> None:
        users = users_parse(calls) if ":" in calls else None
        calls = "none" if users else calls
        self._users, self._tokenizer = users, tokenizer
        self._process: _Process | None = None
        if (calls, reasoning) != ("none", "none"):
            self._process = _Process((calls, reasoning, tokenizer, dict(template_kwargs)))

    @property
    def pid(self) -> int | None:
        """Id of the process, None without one."""
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Wait for the process; raises ValueError for parsers that there are none of."""
        if self._process is not None:
            self._process.thread.submit(self._process.ready).result()

    async def __call__(self, text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
        """Read an answer's text, with the tools of its request."""
        parsed = Parsed(text)
        if self._process is not None:
            loop, process = asyncio.get_running_loop(), self._process
            parsed = await loop.run_in_executor(process.thread, process.ask, text, list(tools))
        if self._users is None:
            return parsed
        users = self._users(parsed.content, tools)
        return users if parsed.reasoning is None else replace(users, reasoning=parsed.reasoning)

    async def others(
        self, answers: Sequence[tuple[str, Sequence[dict[str, Any]]]]
    ) -> dict[str, int]:
        """The number of answers (text, tools) in which each of SGLang's parsers reads a call, without those of 0.

        It takes a process of its own, and seconds.
        """
        process = _Process(("none", "none", self._tokenizer, {}))
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(process.thread, process.compare, answers)
        finally:
            process.close()

    def close(self) -> None:
        """End the process, in the middle of a text too; idempotent."""
        if self._process is not None:
            self._process.close()


class _Process:
    """The process with SGLang's parsers, and the one thread that talks to it."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        try:
            self._setup = pickle.dumps(setup)
        except Exception as error:  # of a tokenizer's own code
            raise ValueError(_NOT_HANDED.format(error)) from error
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="parser")
        self._has_warned, self._closed = False, threading.Event()
        self._process = self._started()
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._closed.set()
        self._process.kill()
        self.thread.shutdown()
        self._ended()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "r3train.engine.parser_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _ended(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def ready(self) -> None:
        if self._is_ready:
            return
        _send(self._process.stdin, self._setup)
        answer = _receive(self._process.stdout, _START_S)
        if answer is None:
            self._ended()
            raise RuntimeError(
                f"the process of the parsers has ended with exit code {self._process.returncode}"
            )
        if problem := json.loads(answer):
            raise ValueError(problem)
        self._is_ready = True

    def compare(self, answers: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> dict[str, int]:
        self.ready()
        _send(self._process.stdin, json.dumps({"answers": answers}).encode())
        found = _receive(self._process.stdout, _STUCK_S)
        return {} if found is None else json.loads(found)

    def ask(self, text: str, tools: list[dict[str, Any]]) -> Parsed:
        self.ready()
        try:
            _send(self._process.stdin, json.dumps([text, tools]).encode())
            answer = _receive(self._process.stdout, _STUCK_S)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._ended()
            if not self._closed.is_set():
                self._process, self._is_ready = self._started(), False
        found = None if answer is None else json.loads(answer)
        if found is None:
            self._tell(text)
            return Parsed(text)
        content, reasoning, calls, ids = found
        return Parsed(content, reasoning, tuple(calls), ids)

    def _tell(self, text: str) -> None:
        if not self._has_warned and not self._closed.is_set():
            self._has_warned = True
            logger.warning(
                "the parsers of answers needed more than %g s for %d characters, which count as text: %s"
                " (later ones are not told)",
                LIMIT_S,
                len(text),
                quoted(text),
            )


# -- the process -------------------------------------------------------------------------------


class _TooLong(BaseException):
    """No ``except Exception`` of a parser takes it for an error of its own."""


def main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imports print
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    setup = _receive(requests)
    if setup is None:
        return
    declare_ops_for_imports()
    try:
        parse = make_parse(*_unpacked(setup))
    except ValueError as error:
        _send(answers, json.dumps(str(error)).encode())
        return
    _send(answers, b'""')
    while (request := _receive(requests)) is not None:
        request = json.loads(request)
        if isinstance(request, dict):
            found = _compared(request["answers"], _unpacked(setup)[2])
        else:
            parsed = within_limit(parse, *request)
            found = parsed and [parsed.content, parsed.reasoning, parsed.calls, parsed.ids]
        _send(answers, json.dumps(found).encode())


def _unpacked(setup: bytes) -> tuple[Any, ...]:
    try:
        return pickle.loads(setup)
    except Exception as error:  # of a tokenizer's own code
        raise ValueError(_NOT_HANDED.format(error)) from error


def _compared(answers: list[tuple[str, list[dict[str, Any]]]], tokenizer: Any) -> dict[str, int]:
    found = {}
    for name in known_calls():
        parse = make_parse(name, "none", tokenizer, {})
        read = [within_limit(parse, *answer) for answer in answers]
        found[name] = sum(parsed is not None and bool(parsed.calls) for parsed in read)
    return {name: count for name, count in found.items() if count}


def within_limit(parse: Parse, text: str, tools: list[dict[str, Any]]) -> Parsed | None:
    """Read a text; None if it takes more CPU time than the limit.  For the main thread."""

    def late(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGPROF, late)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S, 0.1)  # again, for what caught the first
            return parse(text, tools)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _TooLong:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return None


def _send(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def _receive(pipe: BinaryIO, limit_s: float | None = None) -> bytes | None:
    """The next message; None at the pipe's end, or if it does not begin within the limit."""
    if limit_s is not None and not select.select([pipe], [], [], limit_s)[0]:
        return None
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    content = pipe.read(*_LENGTH.unpack(head))
    return content if len(content) == _LENGTH.unpack(head)[0] else None


if __name__ == "__main__":
    main()

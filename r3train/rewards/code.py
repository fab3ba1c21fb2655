"""Reward for a program that passes its tests, run in a process with limits.

docs/guide/data_and_rewards.md says what this protects from and what it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from r3train.rewards.reward import Reward
from r3train.types import Prompt, RolloutSample

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("code_launcher.py")
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 64 << 20
# of all files in a program's directory
_DIRECTORY_BYTES = 128 << 20
# between two looks at them, where no file system of their own bounds them
_LOOK_S = 0.25
# of what a program prints; more is no answer
_OUTPUT_BYTES = 1 << 20
_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.S)
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
_OWN_MOUNTS = ("--mount",)
_OWN_PROCESSES = ("--pid", "--fork", "--kill-child")
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class CodeReward(Reward):
    """1 where the response's program passes every test of the label, else 0.

    The program is the last fenced block of Python (or without a language).  The label is Python code or
    a list of it (asserts), run after the program, or ``{"inputs": [...], "outputs": [...]}``: for each
    input the program must print the output, white space at line ends aside.  A label of text may be
    JSON.  All tests of a sample together may take ``timeout_s``.
    """

    can_be_tried = False  # a label is tests, no program

    name, needs_label = "code", True

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(os.cpu_count() or 1)

    def require_label(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that holds no tests."""
        list(_tests(prompt))

    async def __call__(self, sample: RolloutSample) -> float:
        """Run a sample's program."""
        tests, program = list(_tests(sample.prompt)), program_of(sample.text)
        if program is None:
            return 0.0
        async with self._room:
            return float(await asyncio.to_thread(passes, program, tests, self._timeout_s))


def program_of(text: str) -> str | None:
    """The last fenced block of Python, or of no language; None without one."""
    blocks = [body for language, body in _FENCE.findall(text) if language in ("", "python", "py")]
    return blocks[-1] if blocks else None


def _tests(prompt: Prompt) -> Iterator[tuple[str | None, str, str | None]]:
    """Yield (code, "", None) or (None, input, output) of each test; ValueError names the prompt."""
    label: Any = prompt.label
    if isinstance(label, str):
        with contextlib.suppress(ValueError):
            label = json.loads(label)
    if isinstance(label, str) and label.strip():
        label = [label]
    if isinstance(label, list) and label and all(isinstance(test, str) for test in label):
        yield "\n".join(label), "", None
        return
    if isinstance(label, dict):
        inputs, outputs = label.get("inputs"), label.get("outputs")
        if (
            isinstance(inputs, list)
            and isinstance(outputs, list)
            and 0 < len(inputs) == len(outputs)
        ):
            if all(isinstance(text, str) for text in (*inputs, *outputs)):
                yield from (
                    (None, stdin_text, wanted) for stdin_text, wanted in zip(inputs, outputs)
                )
                return
    raise ValueError(
        f"prompt {prompt.prompt_id}: code needs a label of Python code, a list of it, or a table with as"
        f" many texts in inputs as in outputs, got {str(prompt.label)[:200]!r}"
    )


def passes(program: str, tests: list[tuple[str | None, str, str | None]], timeout_s: float) -> bool:
    """True if a program passes all tests within ``timeout_s``; it stops at the first that fails."""
    deadline = time.monotonic() + timeout_s
    for code, stdin_text, wanted in tests:
        output = run_program(program, stdin_text, deadline - time.monotonic(), tests=code)
        if output is None or wanted is not None and _lines(output) != _lines(wanted):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def run_program(
    program: str, stdin_text: str, timeout_s: float, *, tests: str | None = None
) -> str | None:
    """Run a Python program with ``given`` as its input, within the limits of docs/guide/data_and_rewards.md.

    Returns its output if it, and the tests after it, came to their end in time, else None.
    """
    if timeout_s <= 0:
        return None
    apart = isolation()
    job = {"program": program, "tested": tests is not None}
    job |= {"cpu_s": int(timeout_s) + 1, "memory_bytes": _MEMORY_BYTES, "file_bytes": _FILE_BYTES}
    job["directory_bytes"] = _DIRECTORY_BYTES if _OWN_MOUNTS[0] in apart else None
    deadline = time.monotonic() + timeout_s
    result, result_end = os.pipe()
    with (
        _directory() as directory,
        tempfile.TemporaryFile() as job_file,
        tempfile.TemporaryFile() as tests_file,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        open(result, "rb", buffering=0) as result_file,
    ):
        job_file.write(json.dumps(job).encode())
        tests_file.write(json.dumps(tests).encode())
        stdin.write(stdin_text.encode())
        for file in (job_file, tests_file, stdin):
            file.seek(0)
        fds = job_file.fileno(), tests_file.fileno(), result_end
        launcher = (sys.executable, "-I", str(_LAUNCHER), *map(str, fds))
        try:
            process = subprocess.Popen(
                [*_ends_with_us(), *apart, *launcher],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory},
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            os.close(result_end)
        try:
            ends = select.poll()  # select() takes no descriptor above 1023
            ends.register(result, select.POLLIN)
            fits, seconds_left = True, deadline - time.monotonic()
            # a word, or the end of the process that could write it
            while fits and seconds_left > 0 and not ends.poll(min(seconds_left, _LOOK_S) * 1000):
                seconds_left = deadline - time.monotonic()
                fits = job["directory_bytes"] is not None or _fits(directory)
            fits = fits and (job["directory_bytes"] is not None or _fits(directory))
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(result, False)
        came_to_its_end = bool(result_file.read(1))
        output = os.pread(stdout.fileno(), _OUTPUT_BYTES + 1, 0)
    if not came_to_its_end or not fits or len(output) > _OUTPUT_BYTES:
        return None
    return output.decode(errors="replace")


def _fits(directory: str) -> bool:
    """False once the files of a program are too large together, or hidden from a look."""
    size, todo = 0, [directory]
    while todo and size <= _DIRECTORY_BYTES:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        # an entry takes room too
                        size += entry.stat(follow_symlinks=False).st_blocks * 512 + 2048
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # removed since
            continue
        except OSError:
            return False
    return size <= _DIRECTORY_BYTES


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """A program's directory, removed whatever the program made of it; what stays is told of once."""
    directory = tempfile.mkdtemp(prefix="r3train-code-")
    try:
        yield directory
    finally:  # rm knows no limit of depth
        if not _succeeds("rm", "-rf", directory):
            _succeeds("chmod", "-R", "u+rwx", directory)
            if not _succeeds("rm", "-rf", directory):
                _tell_of_leftovers()


@functools.cache
def _tell_of_leftovers() -> None:
    logger.warning("%s: the directory of a program stays there", tempfile.gettempdir())


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@functools.cache
def _ends_with_us() -> tuple[str, ...]:
    """The command that has a process killed with the one that started it; () without one."""
    return _ENDS_WITH_US if _succeeds(*_ENDS_WITH_US, "true") else ()


@functools.cache
def isolation() -> tuple[str, ...]:
    """The command that takes the network away, and processes that leave the group; () without one."""
    mounts = ("mount", "-t", "tmpfs", "-o", "size=4096", "none", tempfile.gettempdir())
    for command, probe in (
        ((*_UNSHARE, *_OWN_MOUNTS, *_OWN_PROCESSES, "--mount-proc"), mounts),
        ((*_UNSHARE, *_OWN_MOUNTS, *_OWN_PROCESSES), mounts),
        ((*_UNSHARE, *_OWN_PROCESSES, "--mount-proc"), ("true",)),
        ((*_UNSHARE, *_OWN_PROCESSES), ("true",)),
        (_UNSHARE, ("true",)),
    ):
        if _succeeds(*command, *probe):
            return command
    return ()

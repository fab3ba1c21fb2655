"""Reward for a program that passes its tests, run in a process with limits.

docs/guide/data_and_rewards.md says what this protects from and what it does not.
"""

from __future__ import annotations

import ast
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
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from r3train.rewards.reward import bad_label, Reward
from r3train.types import Prompt, RolloutSample

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("code_launcher.py")
_MEMORY_BYTES = 1 << 30
_FILE_BYTES = 64 << 20
# of all files in a program's directory
DIRECTORY_BYTES = 128 << 20
# between two looks at them, where no file system of their own bounds them
_LOOK_S = 0.25
# times its limit that a program is waited for which gets no CPU
_MOST_WAITED = 10
# of what a program prints; more is no answer
_OUTPUT_BYTES = 1 << 20
# the first fence of a line: the fence, the language, the text up to the next such fence
_FENCE = re.compile(r"(?ms)^(?:(?!```|~~~)[^\n])*(`{3,}|~{3,})[ \t]*\{?\.?(\w*)[^\n`]*\n(.*?)\1")
_PYTHON = re.compile(r"i?py(?:thon)?[\d_]*", re.I)
# of a statement without effect
_VALUES = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple)
# calls a function with each list of arguments; an output may stand in a list of one
_CALLS = """
import json as _json
def _plain(value):
    return _json.loads(_json.dumps(value, default=list))
_called = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
for _given, _wanted in _json.loads({cases!r}):
    _got = _plain(_called(*_given))
    assert _got == _wanted or isinstance(_wanted, list) and len(_wanted) == 1 and _got == _wanted[0]
"""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
_OWN_MOUNTS = ("--mount",)
_OWN_PROCESSES = ("--pid", "--fork", "--kill-child")
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class CodeReward(Reward):
    """1 where the response's program passes every test of the label, else 0.

    The program is ``program_of`` the response.  The label is Python code or a list of it (asserts), run after the
    program, or ``{"inputs": [...], "outputs": [...]}``: for each input the program must print the output, white
    space at line ends aside; with ``fn_name`` this function, called with each input, must return the output.  A
    label of text may be JSON, or what Python's ``str`` makes of a table.  All tests of a sample together may take
    ``timeout_s``.
    """

    num_tried, num_checked = 0, 16  # a label is tests, no program

    name, needs_label = "code", True

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.close()

    def close(self) -> None:
        """Let another event loop begin anew."""
        self._room = asyncio.Semaphore(os.cpu_count() or 1)

    def require_label(self, prompt: Prompt) -> None:
        """Raise ValueError for a label that holds no tests."""
        list(_tests(prompt))

    async def check(self, prompt: Prompt) -> None:
        """Raise ValueError for tests that an empty program passes."""
        if await self._passes("", list(_tests(prompt))):
            raise bad_label(prompt, "code: an empty program passes the tests")

    async def __call__(self, sample: RolloutSample) -> float:
        """Run a sample's program."""
        tests, program = list(_tests(sample.prompt)), program_of(sample.text)
        if program is None:
            return 0.0
        return float(await self._passes(program, tests))

    async def _passes(self, program: str, tests: list[Any]) -> bool:
        async with self._room:
            return await asyncio.to_thread(passes, program, tests, self._timeout_s)


def program_of(text: str) -> str | None:
    """The last fenced block of Python, else the last of no language; None without one.

    Blocks before ``</think>`` do not count.  An indented block, as of a list, is read without its indent.
    """
    blocks = _FENCE.findall(text.rpartition("</think>")[2])
    found = [body for _, language, body in blocks if not language]
    found += [body for _, language, body in blocks if _PYTHON.fullmatch(language)]
    body = found[-1] if found else None
    return textwrap.dedent(body) if body and body.lstrip("\n")[:1].isspace() else body


def _tests(prompt: Prompt) -> Iterator[tuple[str | None, str, str | None]]:
    """Yield (code, "", None) or (None, input, output) of each test; ValueError names the prompt."""
    label = _read(prompt.label)
    if isinstance(label, str) and label.strip():
        label = [label]
    if isinstance(label, list) and label and all(isinstance(test, str) for test in label):
        yield _checked("\n".join(label), prompt), "", None
        return
    # tables of parquet have the keys of all rows
    table = {k: v for k, v in label.items() if v is not None} if isinstance(label, dict) else {}
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if further := table.keys() - {"inputs", "outputs", "fn_name"}:
        needs = f"code needs tests of inputs, outputs and perhaps fn_name, not {sorted(further)}"
        raise bad_label(prompt, needs)
    if isinstance(inputs, list) and isinstance(outputs, list) and 0 < len(inputs) == len(outputs):
        if "fn_name" in table:
            yield _calls(table, prompt), "", None
            return
        if all(isinstance(text, str) for text in (*inputs, *outputs)):
            if not any(map(str.strip, outputs)):
                raise bad_label(prompt, "code needs an output that is not empty")
            yield from ((None, stdin_text, wanted) for stdin_text, wanted in zip(inputs, outputs))
            return
    needs = "code needs a label of Python code, a list of it, or a table with as many texts in inputs as in outputs"
    raise bad_label(prompt, needs)


def _read(label: Any) -> Any:
    """A label that is the text of a table or a list, as JSON or as Python writes them, read."""
    for read in (json.loads, json.loads, ast.literal_eval):
        if isinstance(label, str):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                label = read(label)
    return label


def _checked(code: str, prompt: Prompt) -> str:
    """Tests in which something can fail, with the call of HumanEval's ``check``; ValueError names the prompt."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise bad_label(prompt, f"code: the tests are no Python ({error})") from None
    run, can_fail = list(tree.body), False
    for node in run:  # grows; what a function holds is run where it is called
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            run += ast.iter_child_nodes(node)
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        can_fail |= is_call or isinstance(node, (ast.Assert, ast.Raise))
    bare = [node for node in tree.body if isinstance(getattr(node, "value", None), _VALUES)]
    pairs = [node for node in ast.walk(tree) if isinstance(getattr(node, "test", None), ast.Tuple)]
    if no_tests := [each for each in (*bare, *pairs) if isinstance(each, (ast.Expr, ast.Assert))]:
        line = ast.unparse(no_tests[0])
        raise bad_label(prompt, f"code: {line} cannot fail: write assert CONDITION")
    if can_fail:
        return code
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    name = prompt.metadata.get("entry_point")
    if "check" in defined and isinstance(name, str) and name.isidentifier():
        return f"{code}\ncheck({name})"
    write = f"end with a call of {defined[-1]}" if defined else "write assert CONDITION"
    write += ", or name the function in metadata.entry_point" if "check" in defined else ""
    raise bad_label(prompt, f"code: the label runs no test: {write}")


def _calls(table: dict[str, Any], prompt: Prompt) -> str:
    """Code that calls ``fn_name`` for each input: a list of arguments, or text with one as JSON a line."""
    name, cases = table["fn_name"], []
    try:
        for given, wanted in zip(table["inputs"], table["outputs"]):
            if isinstance(given, str):
                given, wanted = map(json.loads, given.splitlines()), json.loads(wanted)
            cases.append(([*given], wanted))
        is_right = name.isidentifier() and all(type(given) is not dict for given in table["inputs"])
    except (TypeError, ValueError, AttributeError):
        is_right = False
    if not is_right:
        needs = "code with fn_name needs inputs that are lists of arguments, or texts with one as JSON a line"
        raise bad_label(prompt, needs)
    return _CALLS.format(name=name, cases=json.dumps(cases))


def passes(program: str, tests: list[tuple[str | None, str, str | None]], timeout_s: float) -> bool:
    """True if a program passes all tests within ``timeout_s``; it stops at the first that fails."""
    for code, stdin_text, wanted in tests:
        output, taken_s = _run(program, stdin_text, timeout_s, code)
        timeout_s -= taken_s
        if output is None or wanted is not None and _lines(output) != _lines(wanted):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def run_program(program: str, stdin_text: str, timeout_s: float) -> str | None:
    """Run a Python program with ``stdin_text`` as its input, within the limits of docs/guide/data_and_rewards.md.

    Returns its output if it came to its end in time, else None.  Time in which the machine did not run it does not count.
    """
    return _run(program, stdin_text, timeout_s, None)[0]


def _run(
    program: str, stdin_text: str, timeout_s: float, tests: str | None
) -> tuple[str | None, float]:
    """The output of a program with tests after it, or None, and the seconds that it took."""
    if timeout_s <= 0:
        return None, 0.0
    apart = isolation()
    job = {"program": program, "tested": tests is not None}
    job |= {"cpu_s": int(timeout_s) + 1, "memory_bytes": _MEMORY_BYTES, "file_bytes": _FILE_BYTES}
    job["directory_bytes"] = DIRECTORY_BYTES if _OWN_MOUNTS[0] in apart else None
    began = time.monotonic()
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
            taken_s, cpu_s, looked, fits = 0.0, 0.0, began, True
            # a word, or the end of the process that could write it
            while not (ended := ends.poll(min(timeout_s - taken_s, _LOOK_S) * 1000 + 1)):
                now, cpu_before = time.monotonic(), cpu_s
                cpu_s, waits = _cpu_time(process.pid)
                taken_s += min(now - looked, max(cpu_s - cpu_before, 0)) if waits else now - looked
                looked = now
                fits = job["directory_bytes"] is not None or _fits(directory)
                if not fits or taken_s >= timeout_s or now - began > _MOST_WAITED * timeout_s:
                    break
            if ended:
                taken_s += min(time.monotonic() - looked, _LOOK_S)
            fits = fits and (job["directory_bytes"] is not None or _fits(directory))
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.set_blocking(result, False)
        came_to_its_end = bool(result_file.read(1))
        output = os.pread(stdout.fileno(), _OUTPUT_BYTES + 1, 0)
    if not came_to_its_end or not fits or len(output) > _OUTPUT_BYTES:
        return None, taken_s
    return output.decode(errors="replace"), taken_s


def _cpu_time(pid: int) -> tuple[float, bool]:
    """The seconds of CPU of a process and of all below it, and whether one of them waits for a CPU or is stopped."""
    seconds, waits = 0.0, False
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])
                waits |= process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_STOPPED)
    return seconds, waits


def _fits(directory: str) -> bool:
    """False once the files of a program are too large together, or hidden from a look."""
    size, todo = 0, [directory]
    while todo and size <= DIRECTORY_BYTES:
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
    return size <= DIRECTORY_BYTES


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

"""A harness as a command: one process tree a session, its task in a file, its reward from one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from r3train.agents.guard import GRACE_S
from r3train.config.agent_settings import AgentSection
from r3train.agents.http import Access
from r3train.agents.harness_reward import Reward, read_reward_file
from r3train.chat.base import AgentFailed, BadReward
from r3train.child_environment import inherited
from r3train.process_tree import descendants, kill_all, marked

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Where harnesses look for the names of their models, Claude Code for those of its smaller ones too.
_MODEL_NAMES = (
    "OPENAI_MODEL OPENAI_DEFAULT_MODEL ANTHROPIC_MODEL ANTHROPIC_SMALL_FAST_MODEL CLAUDE_CODE_SUBAGENT_MODEL"
    " ANTHROPIC_DEFAULT_OPUS_MODEL ANTHROPIC_DEFAULT_SONNET_MODEL ANTHROPIC_DEFAULT_HAIKU_MODEL".split()
)
_TAIL_BYTES = 16384
_TAIL_LINES = 20
# of a guard's end, its own bound among them; of killing what it left, where its ward has stopped or killed it
_GUARD_S, _KILL_S = GRACE_S + 12.0, 5.0
_LINE_BYTES = 1 << 20  # of a worker's answer
_MARK = "R3TRAIN_GUARDED"


async def run_command(
    command: Sequence[str],
    access: Access,
    task: Mapping[str, Any],
    directory: Path,
    settings: AgentSection,
    output: bytearray | None = None,
) -> Reward | None:
    """Run a harness to its end; returns the reward that it wrote, None if it wrote none.

    It runs in ``directory / "work"`` with ``access`` as OpenAI's and Anthropic's variables, the model's name too,
    ``task`` in R3TRAIN_TASK_FILE (JSON: what the harness may know, so no label), and the run's environment without
    secrets and with --agent-env; ``output`` gets the end of what it writes.  Raises AgentFailed, with
    its last lines, for a command that takes longer than --agent-timeout-s, writes a reward that is none, or ends with another
    code than 0 without a reward, or with one under --agent-exit-code-fails.
    When this returns or raises, nothing that it started runs any more.
    """
    directory = directory.absolute()  # the command's own is another
    reward_file, task_file = directory / "reward.json", directory / "task.json"
    task_file.write_text(json.dumps(task), encoding="utf-8")
    environment = harness_environment(access, settings.agent_env) | {
        "OPENAI_API_KEY": access.key,
        "ANTHROPIC_API_KEY": access.key,
        "R3TRAIN_SESSION_URL": access.session_url,
        "R3TRAIN_TASK_FILE": str(task_file),
        "R3TRAIN_REWARD_FILE": str(reward_file),
    }
    guarded, why = Guarded(command, directory, output), None
    try:
        await guarded.start(environment)
        async with asyncio.timeout(settings.agent_timeout_s):
            code = await guarded.wait()
    except TimeoutError:
        code, why = None, f"took longer than {settings.agent_timeout_s:g} s"
    finally:
        await guarded.end()
    if code:
        why = "ended with " + ending(code)
    try:
        reward = read_reward_file(reward_file)
    except ValueError as error:
        raise BadReward(guarded.quoted(f"{why}; {error}" if why else str(error))) from None
    counts = code is not None and reward is not None and not settings.agent_exit_code_fails
    if why is not None and not counts:
        raise AgentFailed(guarded.quoted(why), reward)
    return reward


def harness_environment(access: Access, env_names: Collection[str]) -> dict[str, str]:
    """The environment of all harnesses of a run: its own without secrets, and the way to the model without a key."""
    found = dict.fromkeys(_MODEL_NAMES, access.model) | inherited(os.environ, env_names)
    return found | {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would go to OpenAI, with the key
        **no_proxy(found, access.base_url),
    }


def no_proxy(environ: Mapping[str, str], url: str) -> dict[str, str]:
    """The variables with which clients use no proxy for the host of ``url``, nor for those of ``environ``.

    >>> no_proxy({"NO_PROXY": "a.example"}, "http://[::1]:80/v1")["no_proxy"]
    'a.example,::1'
    """
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    host = urlsplit(url).hostname or ""
    if "*" not in names and host not in names:
        names.append(host)
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))


def ending(code: int) -> str:
    """The end of a process in words."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class Guarded:
    """A command under its guard, in ``directory / "work"``; ``output`` gets the end of what it writes.

    Its environment has a mark, by which what left its guard is found.
    """

    guard: asyncio.subprocess.Process | None = None

    def __init__(
        self, command: Sequence[str], directory: Path, output: bytearray | None = None
    ) -> None:
        self._command, self.directory = command, directory
        self.output = bytearray() if output is None else output

    async def start(self, environment: Mapping[str, str], *, takes_tasks: bool = False) -> None:
        """Start it.  takes_tasks: it has a stdin, and its stdout is no output but its guard's."""
        work, pipe = self.directory / "work", asyncio.subprocess.PIPE
        work.mkdir()
        starting = asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "r3train.agents.guard",
            str(os.getpid()),
            *self._command,
            cwd=work,
            env={**environment, _MARK: str(self.directory)},
            stdin=pipe if takes_tasks else asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe if takes_tasks else asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        # asyncio would kill a guard whose start is cancelled, and its tree would go on
        self.guard, cancelled = await _to_its_end(starting)
        self._reading = asyncio.create_task(self._read(self.guard.stderr or self.guard.stdout))
        if cancelled is not None:
            raise cancelled

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(65536):
            self.add_output(part)

    def add_output(self, part: bytes) -> None:
        """Take a part of its output, of which the end is kept."""
        self.output += part
        del self.output[:-_TAIL_BYTES]

    async def wait(self) -> int:
        """Wait for its end, and that of all that it started; returns its exit code, below 0 of a signal."""
        ended = asyncio.gather(self.guard.wait(), self._reading)
        while self.guard.returncode is None:
            # asyncio waits for the ends of the pipes, too, and those who hold them may have killed the guard
            await asyncio.wait({ended}, timeout=1.0)
        await asyncio.wait({ended}, timeout=1.0)
        return self.guard.returncode

    def quoted(self, what: str) -> str:
        """A line about the command, with the last lines of its output."""
        lines = self.output.decode(errors="replace").splitlines()[-_TAIL_LINES:]
        output = "it wrote nothing" if not lines else "its last lines:\n" + "\n".join(lines)
        return f"--agent-command {shlex.join(self._command)[:200]}: {what}; {output}"

    async def end(self) -> None:
        """End all that it started, within a bound, even if the wait is cancelled."""
        if self.guard is not None:
            _, cancelled = await _to_its_end(self._ended(self.guard))
            if cancelled is not None:
                raise cancelled

    async def _ended(self, guard: asyncio.subprocess.Process) -> None:
        if guard.returncode is None:
            for number in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    guard.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), _GUARD_S)
        if guard.returncode is None or guard.returncode < 0:  # its ward holds it, or has killed it
            if left := await asyncio.to_thread(kill_all, self._left, _KILL_S):
                logger.warning("%s: processes %s cannot be killed", self.directory, left)
            if guard.returncode is None:
                guard.kill()
            await self.wait()

    def _left(self) -> list[int]:
        """Processes of the command that its guard has not ended."""
        below = descendants(self.guard.pid) if self.guard.returncode is None else []
        found = {*below, *marked(f"{_MARK}={self.directory}")}
        return [pid for pid in found if pid != self.guard.pid]


async def _to_its_end(
    call: Coroutine[Any, Any, Result],
) -> tuple[Result, asyncio.CancelledError | None]:
    """Wait for a call's result whatever happens; returns it, and the last cancellation meanwhile."""
    task, cancelled = asyncio.ensure_future(call), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    return task.result(), cancelled

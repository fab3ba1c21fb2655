"""A harness as a command: one process tree a session, its task in a file, its reward from one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from r3train.agents.http import Access
from r3train.agents.harness_reward import Reward, read_reward_file
from r3train.chat.base import AgentFailed
from r3train.child_environment import inherited

Result = TypeVar("Result")

# Where harnesses look for the names of their models, Claude Code for those of its smaller ones too.
_MODEL_NAMES = (
    "OPENAI_MODEL OPENAI_DEFAULT_MODEL ANTHROPIC_MODEL ANTHROPIC_SMALL_FAST_MODEL CLAUDE_CODE_SUBAGENT_MODEL"
    " ANTHROPIC_DEFAULT_OPUS_MODEL ANTHROPIC_DEFAULT_SONNET_MODEL ANTHROPIC_DEFAULT_HAIKU_MODEL".split()
)
_TAIL_BYTES = 16384
_TAIL_LINES = 20


async def run_command(
    command: Sequence[str],
    access: Access,
    task: Mapping[str, Any],
    directory: Path,
    *,
    timeout_s: float,
    env_names: Collection[str] = (),
    output: bytearray | None = None,
) -> Reward | None:
    """Run a harness to its end; returns the reward that it wrote, None if it wrote none.

    It runs in ``directory / "work"`` with ``access`` as OpenAI's and Anthropic's variables, the model's name too, ``task`` in R3TRAIN_TASK_FILE
    (JSON: what the harness may know, so no label), and the run's environment without secrets; ``env_names``
    names further variables; ``output`` gets the end of what it writes.  Raises AgentFailed, with its last lines, for a command that ends with another
    code than 0, takes longer than ``timeout_s`` or writes a reward that is none.  When this returns or
    raises, nothing that it started runs any more.
    """
    directory = directory.absolute()  # the command's own is another
    reward_file, task_file = directory / "reward.json", directory / "task.json"
    work = directory / "work"
    work.mkdir()
    task_file.write_text(json.dumps(task), encoding="utf-8")
    environment = dict.fromkeys(_MODEL_NAMES, access.model) | inherited(os.environ, env_names)
    environment |= {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_BASE": access.base_url,
        "OPENAI_API_KEY": access.key,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.key,
        "R3TRAIN_TASK_FILE": str(task_file),
        "R3TRAIN_REWARD_FILE": str(reward_file),
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would go to OpenAI, with the key
    }
    starting = asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "r3train.agents.guard",
        str(os.getpid()),
        *command,
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is the run's to handle
    )
    # asyncio would kill a guard whose start is cancelled, and its tree would go on
    guard, cancelled = await _to_its_end(starting)
    tail = bytearray() if output is None else output
    try:
        if cancelled is not None:
            raise cancelled
        async with asyncio.timeout(timeout_s):
            await _read_to_end(guard.stdout, tail)
            code = await guard.wait()
    except TimeoutError:
        raise _failed(f"took longer than {timeout_s:g} s", command, tail) from None
    finally:
        await _end(guard)
    if code:
        cause = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise _failed(f"ended with {cause}", command, tail)
    try:
        return read_reward_file(reward_file)
    except ValueError as error:
        raise _failed(str(error), command, tail) from None


async def _read_to_end(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while part := await stream.read(65536):
        tail += part
        del tail[:-_TAIL_BYTES]


async def _end(guard: asyncio.subprocess.Process) -> None:
    """Have the guard end its tree, and wait for that, seconds at most, even if the wait is cancelled."""
    if guard.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            guard.terminate()
    _, cancelled = await _to_its_end(guard.wait())
    if cancelled is not None:
        raise cancelled


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


def _failed(what: str, command: Sequence[str], tail: bytearray) -> AgentFailed:
    lines = tail.decode(errors="replace").splitlines()[-_TAIL_LINES:]
    output = "it wrote nothing" if not lines else "its last lines:\n" + "\n".join(lines)
    return AgentFailed(f"--agent-command {shlex.join(command)[:200]}: {what}; {output}")

"""Workers: processes of --agent-command that stay, and take one task after another.

A task is one line of JSON on a worker's stdin; it answers with one line on its stdout, and takes the next:

    {"id": "7", "base_url": "http://127.0.0.1:4321/v1", "session_url": "http://127.0.0.1:4321/s/KEY/v1", "key": "KEY",
     "model": "r3train", "prompt": "...", "metadata": {}}
    {"id": "7", "reward": 1.0}

Without a reward, or with null, --rm-type scores the last answer.  ``{"id": "7", "error": "why"}`` is a failed agent.  All
other lines are output, as its stderr is.  A worker that ends, or that has not answered in time, fails its task, and
another takes its place.  stdin's end and SIGTERM tell it to end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from r3train.agents.command import ending, Guarded, harness_environment
from r3train.agents.harness_reward import read_reward, Reward
from r3train.agents.http import Access
from r3train.chat.base import AgentFailed, BadReward
from r3train.config.agent_settings import AgentSection
from r3train.user_code import quoted


class Workers:
    """The workers of a run, in directories below ``room``; each has one task at a time.

    A task begins a worker where none is free; --agent-workers of them stay.  ``end`` belongs to the tasks' event loop.
    """

    def __init__(self, settings: AgentSection, room: Path) -> None:
        self._settings, self._room = settings, room.absolute()
        self._command = shlex.split(settings.agent_command)
        self._free: list[Guarded] = []
        self._ids = itertools.count()

    async def run(
        self, access: Access, task: Mapping[str, Any], output: bytearray
    ) -> Reward | None:
        """Have a worker do a task; returns its reward, None if it gave none.

        ``output`` gets the end of what the worker writes meanwhile.  Raises AgentFailed.
        """
        while self._free and self._free[-1].guard.returncode is not None:
            await _end(self._free.pop())
        worker, answer = self._free.pop() if self._free else None, None
        worker = worker or Guarded(self._command, Path(mkdtemp(dir=self._room)))
        worker.output = output
        try:
            if worker.guard is None:
                environment = harness_environment(access, self._settings.agent_env)
                await worker.start(environment, takes_tasks=True)
            async with asyncio.timeout(self._settings.agent_timeout_s):
                answer = await self._answer(worker, access, task)
        except TimeoutError:
            why = f"a worker took longer than {self._settings.agent_timeout_s:g} s"
            raise AgentFailed(worker.quoted(why)) from None
        finally:
            if answer is not None and len(self._free) < (self._settings.agent_workers or 0):
                self._free.append(worker)
            else:
                await _end(worker)
        reward = answer.get("reward")
        try:
            reward = None if reward is None else read_reward(json.dumps(reward).encode())
        except ValueError as error:
            raise BadReward(worker.quoted(str(error))) from None
        if answer.get("error") is not None:
            raise AgentFailed(worker.quoted(quoted(answer["error"], str)), reward)
        return reward

    async def _answer(
        self, worker: Guarded, access: Access, task: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Give a worker a task; returns its answer, and raises AgentFailed where it ends instead."""
        names, number = ("base_url", "session_url", "key", "model"), str(next(self._ids))
        way = {name: getattr(access, name) for name in names}
        worker.guard.stdin.write(json.dumps({"id": number, **way, **task}).encode() + b"\n")
        try:
            while line := await worker.guard.stdout.readline():
                answer = None
                with suppress(ValueError, RecursionError):
                    answer = json.loads(line)
                if isinstance(answer, dict) and str(answer.get("id")) == number:
                    return answer
                worker.add_output(line)
        except ValueError as error:  # of a line without an end
            raise AgentFailed(worker.quoted(f"a worker's answer: {error}")) from None
        raise AgentFailed(worker.quoted(f"a worker ended with {ending(await worker.wait())}"))

    async def end(self) -> None:
        """End the workers that are free; those with a task end with it."""
        free, self._free = self._free, []
        await asyncio.gather(*map(_end, free))


async def _end(worker: Guarded) -> None:
    try:
        await worker.end()
    finally:
        shutil.rmtree(worker.directory, ignore_errors=True)

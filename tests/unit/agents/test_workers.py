"""Workers: real processes of a command that take one task after another."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from r3train.agents.http import Access
from r3train.agents.workers import Workers
from r3train.chat.base import AgentFailed, BadReward
from r3train.config.agent_settings import AgentSection
from tests.unit.agents.scripted import until

# Does what the prompt says; the reward of "say" tells its process.
_WORKER = """if True:
    import json, os, sys, time
    assert "OPENAI_API_KEY" not in os.environ and os.environ["OPENAI_BASE_URL"]
    print("importing", file=sys.stderr, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        answer = {"id": task["id"], "reward": os.getpid()}
        what = task["prompt"]
        if what == "die":
            print("why it died", file=sys.stderr, flush=True)
            os._exit(3)
        if what == "hang":
            open("hangs", "w").close()
            time.sleep(1000)
        if what == "fail":
            answer |= {"error": "no container", "reward": 0.25}
        if what == "nothing":
            answer.pop("reward")
        if what == "text":
            answer["reward"] = "good"
        if what == "noise":
            print("a library's words")
            print(json.dumps({"id": "of another task", "reward": 7}))
            print(json.dumps(["x" * 500_000]))
        if what == "way":
            names = ["base_url", "id", "key", "metadata", "model", "prompt", "session_url"]
            answer["reward"] = float(sorted(task) == names and task["metadata"] == {"long": "y" * 300_000}
                and task["session_url"] == "http://h:1/s/sk-7/v1" and task["key"] == "sk-7")
        print(json.dumps(answer), flush=True)
"""


def _settings(command: list[str], count: int, **more) -> AgentSection:
    return AgentSection(agent_command=shlex.join(command), agent_workers=count, **more)


class _Room:
    """The workers of a test; ``ask`` gives them a task."""

    def __init__(self, path: Path, count: int = 2, **settings) -> None:
        self.workers = Workers(_settings([sys.executable, "-c", _WORKER], count, **settings), path)

    async def ask(self, prompt: str, output: bytearray | None = None, **metadata):
        task = {"prompt": prompt, "metadata": metadata}
        output = bytearray() if output is None else output
        return await self.workers.run(Access("http://h:1/v1", "sk-7"), task, output)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.workers.end()


async def test_a_worker_does_one_task_after_another_with_all_that_a_task_needs(tmp_path):
    async with _Room(tmp_path) as room:
        pids = {await room.ask("say") for _ in range(5)}
        assert len(pids) == 1 and await room.ask("way", long="y" * 300_000) == 1.0
        assert await room.ask("nothing") is None
        output = bytearray()
        assert {await room.ask("noise", output)} == pids
        assert output.endswith(b'x"]\n')
    assert not psutil.pid_exists(int(pids.pop())) and os.listdir(tmp_path) == []


async def test_tasks_at_once_have_a_worker_each_and_as_many_stay_as_may(tmp_path):
    async with _Room(tmp_path) as room:
        pids = set(await asyncio.gather(*(room.ask("say") for _ in range(4))))
        assert len(pids) == 4
        await until(lambda: sum(psutil.pid_exists(int(pid)) for pid in pids) == 2)
        assert set(await asyncio.gather(room.ask("say"), room.ask("say"))) < pids
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


@pytest.mark.parametrize(
    "prompt, what, stays",
    [
        (
            "die",
            "a worker ended with exit code 3; its last lines:\n(importing\n)?why it died$",
            False,
        ),
        ("hang", "a worker took longer than 5 s", False),
        ("fail", "no container", True),
        ("text", "the reward 'good': expected a number", True),
    ],
)
async def test_a_task_that_fails_fails_alone(tmp_path, prompt, what, stays):
    async with _Room(tmp_path, agent_timeout_s=5.0) as room:
        before, output = await room.ask("say"), bytearray()
        with pytest.raises(AgentFailed, match=what) as failed:
            await room.ask(prompt, output)
        assert failed.value.reward == (0.25 if prompt == "fail" else None)
        assert isinstance(failed.value, BadReward) == (prompt == "text")
        assert (b"why it died" in output) == (prompt == "die")
        assert psutil.pid_exists(int(before)) == stays
        after = await room.ask("say")
        assert (after == before) == stays


async def test_a_task_that_is_cancelled_ends_its_worker(tmp_path):
    async with _Room(tmp_path) as room:
        pid = await room.ask("say")
        asked = asyncio.create_task(room.ask("hang"))
        await until(lambda: list(tmp_path.glob("*/work/hangs")))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not psutil.pid_exists(int(pid)) and await room.ask("say") != pid


async def test_a_worker_that_ended_between_tasks_is_replaced(tmp_path):
    async with _Room(tmp_path) as room:
        pid = await room.ask("say")
        psutil.Process(int(pid)).kill()
        await until(lambda: not psutil.pid_exists(int(pid)))
        await asyncio.sleep(1.0)  # its guard ends after it
        assert await room.ask("say") != pid


async def test_a_command_that_is_no_worker_fails_its_task(tmp_path):
    workers = Workers(_settings(["sh", "-c", "echo started; exit 0"], 1), tmp_path)
    task = {"prompt": "x" * 200_000, "metadata": {}}
    with pytest.raises(AgentFailed, match="ended with exit code 0; its last lines:\nstarted"):
        await workers.run(Access("http://h:1/v1", "k"), task, bytearray())

"""Libraries that have tasks, by the examples: rows become data, their own code plays and scores; asked by the real endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tests.e2e import jobs
from tests.unit.agents.scripted import opened, Script
from tests.unit.generation.session_play import assert_sound, Play

from r3train.agents.command import run_command
from r3train.chat.base import AgentFailed, ChatRefused
from r3train.config.agent_settings import AgentSection
from r3train.engine.server import free_port
from r3train.types import Prompt

EXAMPLES = jobs.ROOT / "examples/agents"
pytestmark = [pytest.mark.long, pytest.mark.e2e]


def made(directory: Path, *packages: str, python: str = sys.executable) -> Path:
    """The interpreter of a new environment with packages."""
    subprocess.run([python, "-m", "venv", str(directory)], check=True)
    subprocess.run([directory / "bin/pip", "install", "-qq", *packages], check=True)
    return directory / "bin/python"


async def played(
    command: list, task: dict, said: list[str], directory: Path
) -> tuple[float | None, Play]:
    """A session of a command whose model says these answers; its reward, and the session."""
    play = Play(max_context_len=100_000)
    play.engine.answers = list(said)
    async with opened(play.session.answer) as (_, access):
        reward = await run_command(
            list(map(str, command)), access, task, directory, AgentSection(agent_timeout_s=300)
        )
    return reward, play


def rows_of(command: list) -> list[dict]:
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# -- verifiers -----------------------------------------------------------------------------------

_SUMS = """
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b

def right(completion, answer, **_) -> float:
    return float(answer in str(completion[-1]))

def load_environment():
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in (1, 2)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]))
"""
_SUMS_V1 = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Sum(vf.TaskData):
    answer: str

class Adds(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        return a + b

class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class SumTask(vf.Task[Sum, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Adds(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.last_reply))

class SumsConfig(vf.TasksetConfig):
    task: Config = Config()

class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        data = [Sum(prompt=f"{n} + 1?", answer=str(n + 1)) for n in (1, 2)]
        return [SumTask(row, self.config.task) for row in data]

if __name__ == "__main__":
    Adds.run()
"""
LIBRARIES = {
    "with_verifiers_0_1": ("verifiers==0.1.14", _SUMS, "add"),
    "with_verifiers": ("verifiers==0.4.0", _SUMS_V1, "sums_add"),
}


@pytest.fixture(scope="module", params=LIBRARIES)
def verifiers(request, tmp_path_factory) -> tuple[list, str]:
    """The command of an example, with an environment of two sums where it finds one; the name of its tool."""
    package, program, tool = LIBRARIES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    python = made(directory / "venv", package)
    (directory / "sums.py").write_text(program)
    command = ["env", f"PYTHONPATH={directory}", python, EXAMPLES / f"{request.param}.py"]
    return command, tool


@pytest.mark.parametrize("last, reward", [("It is 3.", 1.0), ("It is 7.", 0.0)])
async def test_a_row_of_verifiers_is_played_and_scored_by_its_environment(
    verifiers, last, reward, tmp_path
):
    command, tool = verifiers
    rows = rows_of([*command, "rows", "sums"])
    assert ["1 + 1?" in str(row["prompt"]) for row in rows] == [True, False]
    calls = f'[{tool} {{"a": 2, "b": 1}}]<|end|>'
    found, play = await played([*command, "play"], rows[1], [calls, f"{last}<|end|>"], tmp_path)
    assert found == reward
    (sample,) = play.session.samples()
    assert_sound([sample])
    assert len(play.session.calls) == 2 and "2 + 1?" in play.text(sample.token_ids)


async def test_what_verifiers_could_not_ask_is_no_reward_of_0(verifiers, tmp_path):
    command, _ = verifiers
    (row, _) = rows_of([*command, "rows", "sums"])
    refused = ChatRefused(400, "invalid_request_error", "not this one")
    async with opened(Script(*[refused] * 20)) as (_, access):
        with pytest.raises(AgentFailed, match="not this one"):
            words = list(map(str, [*command, "play"]))
            await run_command(words, access, row, tmp_path, AgentSection(agent_timeout_s=300))


# -- Harbor --------------------------------------------------------------------------------------


def _types(keys: str, done: bool) -> str:
    commands = [{"keystrokes": keys, "duration": 0.5}] if keys else []
    said = {"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}
    return json.dumps(said) + "<|end|>"


@pytest.mark.parametrize("number, reward", [("3", 1.0), ("4", 0.0)])
async def test_terminus_2_types_what_the_model_says_and_the_check_of_the_row_judges(
    harbor, number, reward, tmp_path
):
    task = {"prompt": "Write 3 into out.txt.", "metadata": {"check": "grep -q 3 out.txt"}}
    said = [_types(f"echo {number} > out.txt\n", False), _types("", True), _types("", True)]
    found, play = await played([harbor, EXAMPLES / "with_harbor.py"], task, said, tmp_path)
    assert found == reward
    (sample,) = play.session.samples()
    assert_sound([sample])
    assert len(play.session.calls) == 3


def _runs(program: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([program, "--version"], capture_output=True).returncode == 0
    return False


@pytest.fixture(scope="module")
def harbor(tmp_path_factory) -> Path:
    if not _runs("python3.12") or shutil.which("tmux") is None:
        pytest.skip("Harbor needs Python 3.12, and terminus-2 needs tmux")
    return made(tmp_path_factory.mktemp("harbor") / "venv", "harbor==0.26.0", python="python3.12")


# -- reasoning-gym -------------------------------------------------------------------------------


def test_rows_of_reasoning_gym_are_scored_by_its_own_function(tmp_path, monkeypatch):
    there = ["--target", str(tmp_path / "packages"), "reasoning-gym==0.1.25"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *there], check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    program = EXAMPLES / "reasoning_gym_tasks.py"
    first, second = rows_of([sys.executable, program, "chain_sum", "--size", "2"])
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from reasoning_gym_tasks import score

    def scored(row: dict, text: str) -> float:
        prompt = Prompt("p", 0, "", np.zeros(1, np.int32), row["label"], metadata=row["metadata"])
        return score(prompt, text, [])

    assert scored(first, f"<think>so</think> <answer>{first['label']}</answer>") == 1.0
    assert scored(first, f"<answer>{second['label']}</answer>") < 1.0
    assert scored(first, first["label"]) < 1.0, "no answer in its tags"


# -- OpenEnv -------------------------------------------------------------------------------------

_GUESSES = """
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    guess: str

class Said(Observation):
    text: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.secret = str(seed)
        return Said(text="guess a digit")

    def step(self, action, timeout_s=None, **_):
        is_right = self.secret in action.guess
        return Said(text="right" if is_right else "wrong", done=is_right, reward=float(is_right))

    @property
    def state(self):
        return State()

app = create_fastapi_app(Game, Guess, Said)
"""


@pytest.fixture(scope="module")
def openenv(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("openenv")
    return made(directory / "venv", "openenv-core==0.3.0", "openai==3.54.0")


async def test_an_environment_of_openenv_answers_and_rewards_the_models_texts(openenv, tmp_path):
    (tmp_path / "guesses.py").write_text(_GUESSES)
    with served(openenv, tmp_path) as url:
        command = [openenv, EXAMPLES / "with_openenv.py", url, "guess"]
        task = {"prompt": "Find it.", "metadata": {"seed": 7}}
        said = ["4<|end|>", "7<|end|>"]
        reward, play = await played(command, task, said, tmp_path)
    assert reward == 1.0
    (sample,) = play.session.samples()
    assert_sound([sample])
    assert len(play.session.calls) == 2 and "wrong" in play.text(sample.token_ids)


@contextlib.contextmanager
def served(python: Path, directory: Path):
    """The address of the server of guesses."""
    port = free_port("127.0.0.1")
    command = [python, "-m", "uvicorn", "guesses:app", "--port", str(port)]
    server = subprocess.Popen(command, cwd=directory, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        for _ in range(600):
            assert server.poll() is None
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)

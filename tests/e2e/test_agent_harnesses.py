"""The harnesses of examples/agents, unmodified and pinned in an environment of their own, asked by the real chat endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import jobs
from tests.unit.agents.scripted import Script, opened
from tests.unit.generation.session_play import assert_sound, Play

from r3train.agents.command import run_command
from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, CUSTODY, SERVED
from r3train.chat.base import AgentFailed, ChatRefused
from r3train.config.agent_settings import AgentSection
from r3train.verify.tiny import TinyOptions, build

EXAMPLES = jobs.ROOT / "examples/agents"
HARNESSES = ["with_openai_agents", "with_mini_swe_agent"]
pytestmark = [pytest.mark.long, pytest.mark.e2e]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a new environment with the harnesses."""
    directory = tmp_path_factory.mktemp("harnesses")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    install = [directory / "bin/pip", "install", "-qq", "-r", EXAMPLES / "requirements.txt"]
    subprocess.run([*install, "anthropic==2.13.0", "smolagents==1.26.0"], check=True)
    return directory / "bin/python"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("agents")
    build(directory, TinyOptions(), force=True)
    subprocess.run([sys.executable, str(EXAMPLES / "prepare.py"), str(directory)], check=True)
    return directory


async def _harness(python, name, script, directory):
    """Let a harness of the examples work with a scripted model; returns its reward and the endpoint's counts."""
    command = [str(python), str(EXAMPLES / f"{name}.py")]
    async with opened(script) as (endpoint, access):
        task = {"prompt": "name colours", "metadata": {"accepted": ["red", "green"]}}
        return (
            await run_command(command, access, task, directory, AgentSection(agent_timeout_s=300)),
            endpoint.stats(),
        )


def _calls(name, word):
    """An answer that picks a word, in the harness's own way."""
    call = ("pick", {"word": word})
    if name == "with_mini_swe_agent":
        call = ("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {word}"})
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    return {"content": word, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_harness_acts_on_the_models_calls(python, name, tmp_path):
    script = Script(_calls(name, "red"), {"content": "done"})
    reward, _ = await _harness(python, name, script, tmp_path)
    assert reward == (0.5 if name == "with_openai_agents" else 1.0)
    assert all(delivered for _, delivered in script.deliveries)
    assert script.requests[0].max_tokens == 4 and script.requests[0].tools


@pytest.mark.parametrize("name", HARNESSES)
async def test_a_harness_asks_once_where_the_context_is_full(python, name, tmp_path):
    text = "This model's maximum context length is 40 tokens."  # litellm goes by the words
    full = ChatRefused(400, "context_length_exceeded", text)
    script = Script(*[full] * 50)
    said = {"with_mini_swe_agent": "ContextWindowExceededError"}
    with pytest.raises(
        AgentFailed, match=said.get(name, "BadRequestError: .*maximum context length")
    ):
        await _harness(python, name, script, tmp_path)
    assert len(script.requests) == 1


_ANTHROPICS = """
import anthropic

client = anthropic.Anthropic()
ask = {"model": "m", "max_tokens": 5, "tools": [{"name": "pick", "input_schema": {"type": "object"}}]}
messages = [{"role": "user", "content": "hi"}]
first = client.messages.create(messages=messages, system="be", **ask)
uses = [block for block in first.content if block.type == "tool_use"]
results = [{"type": "tool_result", "tool_use_id": use.id, "content": "a"} for use in uses]
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
with client.messages.stream(messages=messages, **ask) as stream:
    second = stream.get_final_message()
assert [b.model_dump() for b in second.content] == [b.model_dump() for b in first.content], second
assert second.stop_reason == first.stop_reason == "tool_use" and uses[0].input == {"word": "red"}
try:
    client.messages.create(messages=messages, **ask)
except anthropic.BadRequestError as error:
    assert "prompt is too long" in str(error)
"""


async def test_anthropics_client_gets_answers_streams_and_refusals(python, tmp_path):
    answer = _calls("with_openai_agents", "red") | {"reasoning_content": "hm"}
    script = Script(answer, answer, *[ChatRefused(400, "context_length_exceeded", "40")] * 9)
    async with opened(script) as (endpoint, access):
        await run_command(
            [str(python), "-c", _ANTHROPICS],
            access,
            {},
            tmp_path,
            AgentSection(agent_timeout_s=300),
        )
        assert endpoint.stats() == {"answers": 2, "refused": 1}
    assert script.deliveries == [(0, True), (1, True)]
    roles = [message["role"] for message in script.requests[1].messages]
    assert roles == ["user", "assistant", "tool"]


_SMOLAGENTS = """
import os, sys
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: one
        b: the other
    '''
    return a + b

base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel("r3", api_base=base_url, api_key=key)
kinds = {"tools": ToolCallingAgent, "code": CodeAgent}
kind, planning = sys.argv[1].split(",")
made = kinds[kind](
    tools=[add], model=model, max_steps=3, verbosity_level=0, planning_interval=int(planning) or None
)
print(made.run("add one and two"))
"""
_ADDS = '[add {"a": 1, "b": 2}]<|end|>'
_PLANS = "1. add<end_plan>"
_WRITES = "Thoughts: add.\n<code>\nprint(add(1, 2))\n</code>"
_ENDS = _WRITES.replace("print", "final_answer")


@pytest.mark.parametrize(
    "how, said, begins",
    [
        ("tools,0", [_ADDS, _ADDS, '[final_answer {"answer": "3"}]<|end|>'], ["root"] * 3),
        ("code,0", [_WRITES, _WRITES, _ENDS], ["root"] * 3),
        ("code,2", [_PLANS, _WRITES, _WRITES, _PLANS, _ENDS], ["root"] * 5),
    ],
)
async def test_smolagents_writes_each_answer_anew_and_pays_a_sample_for_each_call(
    python, how, said, begins, tmp_path
):
    play = Play(max_context_len=30000)
    play.engine.answers = list(said)
    async with opened(play.session.answer) as (endpoint, access):
        program = tmp_path / "agent.py"  # it reads the source of a tool
        program.write_text(_SMOLAGENTS)
        command = [str(python), str(program), how]
        await run_command(command, access, {}, tmp_path, AgentSection(agent_timeout_s=300))
        ignored = endpoint.stats().get("ignored_tool_choice", 0)
    samples = play.session.samples()
    assert_sound(samples)
    assert [chain.begins for chain in play.session.chains] == begins
    assert len(samples) == len(play.session.calls) == len(said)
    assert ignored == (3 if how == "tools,0" else 0)


@pytest.mark.parametrize("name", HARNESSES)
def test_a_job_trains_an_unmodified_harness_with_every_verdict_passed(python, tiny, name, tmp_path):
    job = jobs.run(
        tmp_path / "run",
        *f"--config {EXAMPLES / 'agents.toml'} --hf-checkpoint {tiny / 'model'}".split(),
        "--prompt-data",
        str(tiny / "agents.jsonl"),
        *"--num-rollout 3".split(),
        *jobs.FEW_ROWS,
        *"--rollout-batch-size 2 --n-samples-per-prompt 4 --r3-recheck-share 0.25".split(),
        *"--agent-tool-call-parser examples.agents.words:parse".split(),
        "--agent-command",
        f"{python} {EXAMPLES / name}.py",
    )
    assert job.code == 0, job.output
    lines = (job.run_dir / "sessions.jsonl").read_text().splitlines()
    sessions = [json.loads(line) for line in lines]
    assert len(sessions) >= 24 and all(s["failure"] is None for s in sessions)
    assert all(0 <= s["reward"] <= 1 for s in sessions) and any(s["reward"] for s in sessions)
    begins = {tuple(sample["begins"] for sample in s["samples"]) for s in sessions}
    if name == "with_openai_agents":
        assert begins == {("root",)}, "it only appends"
    audit = audit_run(job.run_dir)
    assert audit.claims == dict.fromkeys((*CLAIMS, SERVED, CUSTODY), "passed"), audit.findings

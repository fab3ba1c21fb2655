"""An agent is tried before a server starts: its function, its parser, its template, the room for its samples."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.e2e.tool_calculator import TEMPLATE

from r3train.agents.http import Access
from r3train.chat.base import AgentFailed, ChatRequest, Parsed
from r3train.config import RunConfig
from r3train.config.agent_settings import AgentSection
from r3train.families.checks.settings_checks import check_longest_chain
from r3train.families.read_facts import read_hf_facts
from r3train.config.sources import ConfigError
from r3train.data.tokenizer import load_tokenizer
from r3train.engine.backend import SamplingParams, Segment
from r3train.generation import stitch
from r3train.generation.agent_episode import AgentEpisode
from r3train.generation.sessions import Session
from r3train.launch.job.agents import (
    check_command,
    make_agents,
    make_parser,
    rehearse,
    runner,
    session_settings,
)
from r3train.launch.estimate.memory_use import longest_sample
from r3train.loop.step_metrics import agent_metrics, shared_failure
from r3train.observe.metric_table import row_of
from r3train.types import Prompt
from r3train.verify.tiny import build, TinyOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, TinyOptions(), force=True)
    file = directory / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return directory / "model"


async def agent(task) -> None: ...


def not_async(task) -> None: ...


MAY_END = threading.Event()


async def blocks(task) -> float:
    return float(MAY_END.wait(20))


def parse(text, tools) -> Parsed:
    return Parsed(text)


def after_the_mark(text, tools) -> Parsed:
    before, mark, after = text.partition("<|tool_call|>")
    call = {"name": "make", "arguments": json.dumps({"a": after.strip()})}
    return Parsed(before, None, (call,) if mark else ())


HERE = "tests.unit.launch.test_agents"


def rehearsed(model: Path, template: str | None = None, **settings) -> tuple[str, ...]:
    given = {"agent": f"{HERE}:agent", "agent_tool_call_parser": "none"}
    given |= {"agent_reasoning_parser": "none"} | settings
    config = RunConfig.from_toml(
        "configs/tiny_cpu.toml",
        {"apply_chat_template": True, "hf_checkpoint": str(model), **given},
    )
    tokenizer = load_tokenizer(model)
    if template is not None:
        tokenizer.chat_template = template
    return rehearse(config, read_hf_facts(model), tokenizer)


def test_three_turns_of_an_agent_are_rehearsed_and_shown(model):
    (line,) = rehearsed(model)
    assert line.startswith(f"--agent {HERE}:agent: three turns are 1 sample of ")
    assert line.endswith("history append, arguments as a table")
    (line,) = rehearsed(model, agent_tool_call_parser=f"{HERE}:parse", agent_history="template")
    assert "history template" in line


async def test_a_function_that_blocks_holds_up_no_loop_but_that_of_the_agents():
    """It is told to go on by the loop that asked it."""
    run, _ = runner(AgentSection(agent=f"{HERE}:blocks"), Path("none"))
    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None)
    working = asyncio.ensure_future(run(Access("http://x/v1", "k"), prompt, bytearray()))
    await asyncio.sleep(0.1)
    MAY_END.set()
    assert await working == 1.0


_TELLS = """if True:
    import os, sys
    open(os.environ["R3TRAIN_REWARD_FILE"], "w").write("0.5")
    sys.exit(3)
"""
_ECHOES = """if True:
    import json, sys
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps({"id": task["id"], "reward": len(task["prompt"])}), flush=True)
"""


async def test_settings_of_commands_and_workers_reach_them(tmp_path):
    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None, content="four")

    def settings(program, **more):
        command = shlex.join([sys.executable, "-c", program])
        return AgentSection(agent_command=command, **more)

    async def outcome(program, **more):
        run, end = runner(settings(program, **more), tmp_path)
        try:
            return await run(Access("http://x/v1", "k"), prompt, bytearray())
        finally:
            await end()

    assert await outcome(_TELLS) == 0.5
    with pytest.raises(AgentFailed, match="exit code 3"):
        await outcome(_TELLS, agent_exit_code_fails=True)
    assert await outcome(_ECHOES, agent_workers=3) == 4.0
    with pytest.raises(AgentFailed, match="longer than 0.5 s"):
        await outcome("import time; time.sleep(99)", agent_workers=1, agent_timeout_s=0.5)
    assert not list((tmp_path / "agents").iterdir())


def test_workers_bound_the_sessions_at_once():
    given = {"apply_chat_template": True, "agent_command": "x", "rollout_max_concurrency": 16}
    for more, most in (
        ({}, 16),
        ({"agent_workers": 5}, 5),
        ({"agent_workers": 5, "agent_max_sessions": 3}, 3),
    ):
        assert RunConfig.from_toml("configs/tiny_cpu.toml", given | more).max_sessions == most


async def tells_its_proxies(task) -> float:
    around = urllib.request.proxy_bypass("h.example:1"), urllib.request.proxy_bypass("c.example")
    return float(around == (True, False) and task.session_url == "http://h.example:1/s/k/v1")


async def test_no_proxy_stands_between_a_function_and_its_endpoint(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "d.example")
    run, _ = runner(AgentSection(agent=f"{HERE}:tells_its_proxies"), Path("none"))
    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None)
    assert await run(Access("http://h.example:1/v1", "k"), prompt, bytearray()) == 1.0
    assert os.environ["NO_PROXY"] == "d.example,h.example"


# It asks until it is refused; the reward says how long a context is.  It knows its session by its path alone.
_ASKS_ON = """if True:
    import json, os, urllib.request
    url = os.environ["R3TRAIN_SESSION_URL"].replace("public.example", "127.0.0.1")
    models = json.load(urllib.request.urlopen(url + "/models"))
    open(os.environ["R3TRAIN_REWARD_FILE"], "w").write(str(models["data"][0]["max_model_len"]))
    messages = [{"role": "user", "content": "red"}]
    while True:
        request = urllib.request.Request(url + "/chat/completions", json.dumps({"messages": messages}).encode())
        messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
        messages.append({"role": "user", "content": "blue"})
"""


async def test_settings_of_sessions_and_of_the_endpoint_reach_them(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = RunConfig.from_toml(
        "configs/tiny_cpu.toml",
        {
            "apply_chat_template": True,
            "hf_checkpoint": str(model),
            "agent_command": shlex.join([sys.executable, "-c", _ASKS_ON]),
            "agent_tool_call_parser": "none",
            "agent_reasoning_parser": "none",
            "agent_max_calls": 3,
            "agent_max_answer_len": 5,
            "agent_port": port,
            "agent_base_url": f"http://public.example:{port}",
            "rollout_max_context_len": 150,
            "rollout_max_response_len": 140,
        },
    )
    tokenizer = load_tokenizer(model)

    async def generate(sample, limit):
        own = np.full(limit, tokenizer.encode("red", add_special_tokens=False)[0], np.int32)
        zeros = np.zeros(limit)
        facts = zeros.astype(np.float32), zeros.astype(np.int32), None, 0, "length"
        return stitch.extend(sample, Segment(own, *facts))

    job = SimpleNamespace(config=config, hf=read_hf_facts(model), tokenizer=tokenizer)
    agents = make_agents(job, tmp_path)
    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None, content="red")
    try:
        sampling = SamplingParams(140)
        _, reward = await AgentEpisode(agents)(generate, prompt, sampling=sampling, sample_id=0)
    finally:
        await agents.stop()
        agents.close()
    [session] = map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())
    assert (session["calls"], session["truncated"], session["failure"]) == (3, "calls", None)
    assert sum(sample["with_loss"] for sample in session["samples"]) == 3 * 5
    assert reward == 150.0


@pytest.mark.parametrize(
    "words", ["bin/run.sh", "./bin/run.sh -x", "sh bin/run.sh", "python agent.py"]
)
def test_a_file_of_this_directory_is_refused_with_its_absolute_path(words, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("bin/run.sh", "agent.py", "serve"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)

    name = "agent.py" if "agent.py" in words else "bin/run.sh"
    with pytest.raises(ValueError, match=str(tmp_path / name)):
        check_command(AgentSection(agent_command=words))
    absolute = words.replace("./", "").replace(name, str(tmp_path / name))
    check_command(AgentSection(agent_command=absolute))
    for others in ("sh serve", "sh -c 'cat agent.py; bin/run.sh'"):  # names by chance, and texts
        check_command(AgentSection(agent_command=others))


async def test_a_parser_sees_special_tokens_and_not_the_one_that_ends_the_answer(model):
    config = RunConfig.from_toml(
        "configs/tiny_cpu.toml",
        {
            "apply_chat_template": True,
            "hf_checkpoint": str(model),
            "agent": "m:f",
            "agent_tool_call_parser": f"{HERE}:after_the_mark",
            "agent_reasoning_parser": "none",
        },
    )
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool_call|>", "<|eot|>"]})
    own = tokenizer.encode("red <|tool_call|> blue <|eot|>", add_special_tokens=False)

    async def generate(sample, limit):
        zeros = np.zeros(len(own))
        return stitch.extend(
            sample,
            Segment(
                np.array(own, np.int32),
                zeros.astype(np.float32),
                zeros.astype(np.int32),
                None,
                0,
                "stop",
            ),
        )

    prompt = Prompt("p", 0, "", np.zeros(1, np.int32), None)
    settings = session_settings(
        config, read_hf_facts(model), tokenizer, make_parser(config, tokenizer)
    )
    session = Session(settings, generate, prompt, 0, fail=pytest.fail)
    tools = ({"type": "function", "function": {"name": "make", "parameters": {}}},)
    answer, _ = await session.answer(ChatRequest([{"role": "user", "content": "red"}], b"", tools))
    [call] = answer.message["tool_calls"]
    assert call["function"] == {"name": "make", "arguments": '{"a": "blue"}'}
    assert answer.message["content"].strip() == "red"


WITHOUT_TOOLS = TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
)
HIDES_TOOLS = TEMPLATE.replace(
    "{% if tools %}please {{ tools[0].function.name }} <eos>{% endif %}", ""
)
CHANGES = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content }}{% if not loop.last %}{{ loop.index }}{% endif %}"
)


def test_a_template_without_answers_of_tools_is_said_and_one_that_rewrites_is_refused(model):
    (line,) = rehearsed(model, WITHOUT_TOOLS)
    assert (
        "no tools: no answer of a tool can follow its call: the chat template does not write"
        in line
    )
    (line,) = rehearsed(model, HIDES_TOOLS)
    assert line.endswith("no tools: the chat template does not show the tools")
    with pytest.raises(ValueError, match="no turn can follow an answer"):
        rehearsed(model, CHANGES)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"agent": f"{HERE}:not_async"}, "--agent .*:not_async: expected an async function"),
        ({"agent": f"{HERE}:nothing"}, "--agent .*:nothing: .* has no nothing"),
        (
            {"agent": None, "agent_command": "no-such-harness -x"},
            "no-such-harness -x: no such command",
        ),
        ({"agent_tool_call_parser": "unheard_of"}, "--agent-tool-call-parser unheard_of"),
        (
            {"agent_tool_call_parser": f"{HERE}:nothing"},
            "--agent-tool-call-parser .* has no nothing",
        ),
    ],
)
def test_an_agent_or_a_parser_that_cannot_be_used_is_refused(settings, said, model):
    with pytest.raises(ValueError, match=said):
        rehearsed(model, **settings)


def test_the_longest_chain_of_an_agent_fits_a_microbatch(model):
    flags = {"hf_checkpoint": str(model), "rollout_max_context_len": 200, "max_tokens_per_gpu": 199}
    config, hf = RunConfig.from_toml("configs/tiny_cpu.toml", flags), read_hf_facts(model)
    with pytest.raises(ConfigError, match="= 199 is below rollout_max_context_len 200"):
        check_longest_chain(config, hf)
    room = config.trainer.model_copy(update={"max_tokens_per_gpu": 200})
    check_longest_chain(config.model_copy(update={"trainer": room}), hf)


def test_memory_is_estimated_for_samples_as_long_as_the_context(model):
    flags = {"hf_checkpoint": str(model), "rollout_max_context_len": 200}
    hf = read_hf_facts(model)
    plain = RunConfig.from_toml("configs/tiny_cpu.toml", flags)
    agents = RunConfig.from_toml("configs/tiny_cpu.toml", flags | {"agent": "m:f"})
    assert longest_sample(plain, hf, 5) < 200 == longest_sample(agents, hf, 5)


def test_the_numbers_of_a_step_are_of_the_sessions_that_ended_in_it():
    before = {"sessions": 4, "calls": 9, "roots": 4, "prompt_again": 0, "tokens": 100}
    before |= {"seconds": 8.0, "called_s": 8.0, "session_s_max": 3.0}
    now = {"sessions": 6, "calls": 15, "roots": 7, "forks": 1, "prompt_again": 50, "tokens": 300}
    now |= {"cut_by_client": 3}
    now |= {"seconds": 12.0, "called_s": 9.0, "session_s_max": 3.0, "ignored_seed": 2}
    before, now = before | {"chains": 4}, now | {"chains": 8, "template_differs": 1}
    found = agent_metrics(now, before)
    assert (found["agent/sessions"], found["agent/calls_mean"], found["agent/roots_mean"]) == (
        2,
        3,
        1.5,
    )
    assert found["agent/reprompted_share"] == 0.25 and found["agent/harness_s_share"] == 0.75
    assert found["agent/template_differs"] == 0.25 and found["agent/cut_by_client"] == 0.5
    assert found["agent/ignored_seed"] == 2 and found["agent/session_s_mean"] == 2.0
    assert all(row_of(key) is not None for key in found)
    assert agent_metrics(now, now) == agent_metrics({}, {}) == {}


SUMS = {"sessions": 4, "failures": 4, "causes": {"it raised KeyError": 4}}


@pytest.mark.parametrize(
    "now, said",
    [
        (
            {"sessions": 8, "failures": 8, "causes": {"it raised KeyError": 5, "late": 3}},
            "all 4 sessions of agents failed, 3 of them so: late",
        ),
        ({"sessions": 8, "failures": 7, "causes": {"it raised KeyError": 4, "late": 3}}, ""),
        (SUMS, ""),
    ],
    ids=["all of this step", "one worked", "none ended"],
)
def test_a_failure_is_told_of_a_step_whose_sessions_all_failed(now, said):
    assert shared_failure(now, SUMS) == said and shared_failure({}, {}) == ""


def test_refusals_and_calls_of_a_step_have_metrics_with_a_row_each():
    before = {"sessions": 1, "refused": 2, "prompt_again": 0, "tokens": 1, "called_s": 1.0}
    before |= {"seconds": 1.0, "causes": {}, "session_s_max": 1.0}
    now = before | {"sessions": 3, "refused": 7, "refused_n": 5, "tool_calls": 6, "unread_calls": 4}
    found = agent_metrics(now, before)
    assert (found["agent/refused"], found["agent/refused_n"]) == (5, 5)
    assert (found["agent/tool_calls_mean"], found["agent/unread_calls"]) == (3, 4)
    assert all(row_of(key) is not None for key in found)

"""Parsers in a process of their own: no text holds up the event loop, and no text ends the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from r3train.chat.base import Parsed
from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.data.tokenizer import load_tokenizer
from r3train.engine import parser_process
from r3train.engine.parser_process import Parser, within_limit
from r3train.launch.job.agents import make_agents
from r3train.verify.tiny import build, TinyOptions
from tests.e2e.tool_calculator import use_template
from tests.unit.agents.scripted import until
from tests.unit.engine.test_parsers import _CALL, _TOOLS, _Tokenizer, users

pytestmark = pytest.mark.e2e  # each process imports SGLang

# a call of 40 arguments that was cut before its end
_ENDLESS = "[add(" + "a=1, " * 40
_HERE = "tests.unit.engine.test_parsers"


@pytest.fixture(scope="module")
def parser():
    made = Parser("pythonic", "qwen3", _Tokenizer(), {})
    yield made
    made.close()


async def test_a_text_is_read(parser):
    parsed = await parser("<think>hm</think>[add(a=1)]", _TOOLS)
    assert parsed == Parsed("", "hm", ({"name": "add", "arguments": '{"a": 1}'},))
    assert await parser("[no call", _TOOLS) == Parsed("[no call")


async def test_the_loop_answers_while_a_text_takes_long_which_counts_as_text_and_is_told_once(
    parser, caplog
):
    rounds, process = 0, parser.pid
    asked = asyncio.create_task(parser(_ENDLESS, _TOOLS))
    while not asked.done():
        await asyncio.sleep(0.01)
        rounds += 1
    assert await asked == Parsed(_ENDLESS)
    assert rounds > 10, "the loop stood still"
    assert await parser(_ENDLESS, _TOOLS) == Parsed(_ENDLESS)
    [said] = [r.message for r in caplog.records if r.name == parser_process.__name__]
    assert "needed more than 2 s for 205 characters, which count as text: '[add(a=1" in said
    assert (await parser("[add(a=1)]", _TOOLS)).calls
    assert parser.pid == process, "it takes the next one without a new start"


async def test_a_process_that_ends_is_started_again(parser):
    os.kill(parser.pid, signal.SIGKILL)
    assert await parser("[add(a=1)]", _TOOLS) == Parsed("[add(a=1)]")
    assert (await parser("[add(a=1)]", _TOOLS)).calls


async def test_it_ends_in_the_middle_of_a_text():
    parser = Parser("pythonic", "none", _Tokenizer(), {})
    parser.check()
    asked = asyncio.create_task(parser(_ENDLESS, _TOOLS))
    await asyncio.sleep(0.2)
    process = parser.pid
    await asyncio.to_thread(parser.close)
    assert await asked == Parsed(_ENDLESS) and not psutil.pid_exists(process)
    parser.close()


async def test_it_ends_with_the_run_that_is_killed():
    program = f"""if True:
        import sys, time
        from {_HERE} import _Tokenizer
        from r3train.engine.parser_process import Parser
        parser = Parser("qwen25", "none", _Tokenizer(), {{}})
        print(parser.pid, flush=True)
        time.sleep(1000)
    """
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    await until(lambda: not psutil.pid_exists(process))


def test_a_name_that_is_none_is_refused_with_the_known_ones():
    parser = Parser("qwen26", "none", _Tokenizer(), {})
    with pytest.raises(ValueError, match="--agent-tool-call-parser qwen26: unknown.* qwen25"):
        parser.check()
    parser.close()


class _Own(_Tokenizer):
    """A tokenizer that the process cannot make: it has no such module."""

    def __reduce__(self):
        return eval, ("__import__('transformers_modules.own')",)


@pytest.mark.parametrize("tokenizer", [_Own(), lambda: None])
def test_a_tokenizer_that_cannot_be_handed_over_is_refused_with_what_needs_no_process(tokenizer):
    with pytest.raises(ValueError, match="cannot be handed to the process .*module:function"):
        parser = Parser("qwen25", "none", tokenizer, {})
        try:
            parser.check()
        finally:
            parser.close()


async def test_the_users_own_parser_reads_what_follows_the_reasoning_without_a_process():
    parser = Parser(f"{_HERE}:users", "none", _Tokenizer(), {})
    assert parser._process is None
    assert await parser("<think>hm</think>x", _TOOLS) == users("<think>hm</think>x", _TOOLS)
    both = Parser(f"{_HERE}:users", "qwen3", _Tokenizer(), {})
    assert (await both("<think>hm</think>x", _TOOLS)).reasoning == "hm"
    assert (await both(f"<think>hm</think>{_CALL}", _TOOLS)).content == _CALL.upper()
    both.close()


def test_a_parser_that_catches_all_that_it_can_is_ended_too(monkeypatch):
    monkeypatch.setattr(parser_process, "LIMIT_S", 0.1)

    def stubborn(text, tools):
        for _ in range(3):
            try:
                while True:
                    pass
            except:  # noqa: E722
                pass
        while True:
            try:
                sum(range(1000))
            except Exception:
                pass

    before = signal.getsignal(signal.SIGPROF)
    try:
        assert within_limit(stubborn, "x", []) is None
        assert within_limit(lambda text, tools: Parsed(text), "x", []) == Parsed("x")
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("own", ["qwen25", "none"])
async def test_other_parsers_are_compared_by_the_calls_that_they_read(own):
    """qwen25 wants newlines that hermes does without; one text would take the pythonic parser an hour."""
    parser = Parser(own, "none", _Tokenizer(), {})
    unread = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    try:
        found = await parser.others([(unread, _TOOLS), (_ENDLESS, _TOOLS), ("no call", _TOOLS)])
        assert found["hermes"] == 1 and "qwen25" not in found and "pythonic" not in found
        assert not await parser.others([("no call", _TOOLS)])
        assert not (await parser(unread, _TOOLS)).calls
    finally:
        parser.close()


async def test_the_agents_of_a_run_can_ask_for_other_parsers(tmp_path):
    build(tmp_path, TinyOptions())
    use_template(tmp_path / "model")
    given = {"hf_checkpoint": str(tmp_path / "model"), "apply_chat_template": True}
    given |= {"agent_tool_call_parser": "none", "agent_reasoning_parser": "none"}
    given |= {"agent": "tests.e2e.scripted_agent:run"}
    config = RunConfig.from_toml("configs/tiny_cpu.toml", given)
    hf, tokenizer = read_hf_facts(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    agents = make_agents(SimpleNamespace(config=config, hf=hf, tokenizer=tokenizer), tmp_path)
    assert (await agents.other_parsers([(_CALL, _TOOLS)]))["hermes"] == 1
    agents.close()

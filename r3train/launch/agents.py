"""Agents of a run: what they share, wired from a checked job."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from r3train.agents.command import run_command
from r3train.agents.http import Access, ChatEndpoint
from r3train.chat.base import AgentFailed, AgentTask, ChatRefused, ChatRequest, Parsed, Read
from r3train.config import RunConfig
from r3train.config.agent_settings import AgentSection
from r3train.config.cross_checks import context_len
from r3train.config.hf_facts import HfModelFacts
from r3train.data.json_lines import append_lines
from r3train.data.templates import ChatTemplate, SessionTemplate
from r3train.engine.backend import SamplingParams, Segment
from r3train.engine.parser_process import Parser
from r3train.generation import stitch
from r3train.generation.agent_episode import Agents
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.generation.sessions import Session, SessionSettings
from r3train.launch.job import Job, stop_token_ids
from r3train.types import Prompt, RolloutSample
from r3train.user_code import import_user_code

_LONG = 1 << 20  # tokens
SESSIONS_FILE = "sessions.jsonl"


def get_agent(name: str) -> Callable[[AgentTask], Awaitable[Any]]:
    """Return the function that --agent names; raises ValueError for anything but an async one."""
    found = import_user_code("--agent", name)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"--agent {name}: expected an async function of an AgentTask")
    return found


def make_parser(config: RunConfig, tokenizer: Any) -> Parser:
    """Make what reads the answers' texts."""
    return Parser(
        config.agent.agent_tool_call_parser,
        config.agent.agent_reasoning_parser,
        tokenizer,
        config.data.apply_chat_template_kwargs,
    )


def session_settings(
    config: RunConfig, hf: HfModelFacts, tokenizer: Any, read: Read
) -> SessionSettings:
    """Make what the sessions of a job share; raises ValueError for a template that no way works for."""
    return SessionSettings(
        template=SessionTemplate.of(ChatTemplate(tokenizer, config.data)),
        read=read,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        sampling=SamplingParams(config.rollout.rollout_max_response_len),
        max_context_len=context_len(config, hf),
        history=config.agent.agent_history,
        max_calls=config.agent.agent_max_calls,
    )


def rehearse(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> tuple[str, ...]:
    """Import the agent and its parser, and play three turns without a server; return lines that say what came of it.

    Raises ValueError for an agent, a parser or a template that cannot be used.
    """
    settings = config.agent
    if settings.agent is not None:
        get_agent(settings.agent)
    elif shutil.which(shlex.split(settings.agent_command)[0]) is None:
        raise ValueError(f"{settings.named}: no such command")
    parser = make_parser(config, tokenizer)
    try:
        parser.check()
    finally:
        parser.close()
    shared = session_settings(config, hf, tokenizer, parser)
    template = shared.template
    stops = stop_token_ids(config, hf, tokenizer)
    if not stops:
        raise ValueError(
            f"{settings.named} needs a token that ends an answer: --rollout-stop-token-ids"
        )
    uses_tools = template.no_tools is None
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tools = (tool,) if uses_tools else ()

    async def read(text: str, tools: Any) -> Parsed:
        return Parsed(
            text, None, ({"name": "look", "arguments": "{}"},) * (len(calls) < 2 and uses_tools)
        )

    async def generate(sample: RolloutSample, limit: int) -> RolloutSample:
        token_ids = [*tokenizer.encode("I look.", add_special_tokens=False), stops[0]]
        zeros = np.zeros(len(token_ids))
        segment = Segment(
            np.array(token_ids, np.int32),
            zeros.astype(np.float32),
            zeros.astype(np.int32),
            None,
            0,
            "stop",
        )
        return stitch.extend(sample, segment)

    calls: list[dict[str, Any]] = []
    prompt = Prompt("rehearsal", 0, "", np.zeros(1, np.int32), None)

    def fail(error: BaseException) -> None:
        raise error

    # the template is tried, not the lengths of a run
    unbounded = replace(shared, read=read, sampling=SamplingParams(_LONG), max_context_len=_LONG)
    session = Session(unbounded, generate, prompt, 0, fail=fail)

    async def play() -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
        for _ in range(3):
            answer, commit = await session.answer(ChatRequest(list(messages), b"", tools))
            commit(True)
            calls.append(answer.message)
            messages.append(answer.message)
            made = answer.message.get("tool_calls", ())
            follow = [
                {"role": "tool", "content": "A lawn.", "tool_call_id": call["id"], "name": "look"}
                for call in made
            ]
            messages += follow or [{"role": "user", "content": "And now?"}]

    try:
        asyncio.run(play())
    except ChatRefused as refused:
        raise ValueError(f"{settings.named}: three turns in rehearsal: {refused}") from None
    samples = session.samples()
    how = (
        f"arguments as {'a table' if template.arguments == 'table' else 'text'}"
        if uses_tools
        else f"no tools: {template.no_tools}"
    )
    return (
        f"{settings.named}: three turns are {len(samples)} sample{'s' * (len(samples) != 1)} of"
        f" {sum(s.num_tokens for s in samples)} tokens, history {settings.agent_history}, {how}",
    )


def make_agents(job: Job, run_dir: Path) -> Agents:
    """Make what the sessions of a run share; run_dir: of sessions.jsonl and the directories of commands."""
    settings, parser = job.config.agent, make_parser(job.config, job.tokenizer)

    def record(facts: Mapping[str, Any]) -> None:
        append_lines(run_dir / SESSIONS_FILE, [facts])

    return Agents(
        settings=settings,
        sessions=session_settings(job.config, job.hf, job.tokenizer, parser),
        endpoint=make_chat_endpoint(settings),
        run=_runner(settings, run_dir),
        name=settings.named,
        record=record,
        close=parser.close,
    )


def make_chat_endpoint(settings: AgentSection) -> ChatEndpoint:
    """Make the chat endpoint of all sessions; it belongs to the event loop that opens it."""
    return ChatEndpoint(
        host=settings.agent_host,
        port=settings.agent_port,
        max_parallel=settings.agent_max_parallel,
        strict=settings.agent_strict,
        model=settings.agent_model,
        other_base_url=settings.agent_other_base_url,
        other_key=os.environ.get("R3TRAIN_AGENT_OTHER_API_KEY"),
    )


def _runner(settings: AgentSection, run_dir: Path) -> Callable[[Access, Prompt], Awaitable[Any]]:
    """Return what lets the agent work on a prompt; run_dir: of the directories of commands."""
    if settings.agent_command is None:
        return _function(settings)
    command, room = shlex.split(settings.agent_command), run_dir / "agents"

    async def run(access: Access, prompt: Prompt) -> Any:
        room.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=room, ignore_cleanup_errors=True) as directory:
            return await run_command(
                command,
                access,
                {"prompt": prompt.content, "metadata": prompt.metadata},
                Path(directory),
                timeout_s=settings.agent_timeout_s,
                env_names=settings.agent_env,
            )

    return run


def _function(settings: AgentSection) -> Callable[[Access, Prompt], Awaitable[Any]]:
    """Return what runs the function of --agent in an event loop of its own, where it may block its like only."""
    function, loop = get_agent(settings.agent), EnvironmentLoop("--agent-timeout-s")
    # a line for each call of the model
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run(access: Access, prompt: Prompt) -> Any:
        task = AgentTask(
            access.base_url,
            access.key,
            prompt.content,
            prompt.label,
            dict(prompt.metadata),
            access.model,
        )
        what = f"prompt {prompt.prompt_id}: the agent"
        try:
            return await loop.ask(lambda: function(task), what, settings.agent_timeout_s)
        except ValueError as error:
            raise AgentFailed(str(error)) from error

    return run

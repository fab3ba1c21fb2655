"""Agents of a run: what they share, wired from a checked job."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from r3train.agents.command import no_proxy, run_command
from r3train.agents.http import Access, ChatEndpoint
from r3train.agents.workers import Workers
from r3train.chat.base import AgentFailed, AgentTask, ChatRefused, ChatRequest, Parsed, Read
from r3train.config import RunConfig
from r3train.config.agent_settings import AgentSection
from r3train.families.checks.settings_checks import context_len
from r3train.families.hf_facts import HfModelFacts
from r3train.data.json_lines import append_lines
from r3train.data.templates import ChatTemplate, SessionTemplate
from r3train.engine.backend import SamplingParams, Segment
from r3train.engine.parser_process import Parser
from r3train.generation import stitch
from r3train.generation.agent_episode import Agents
from r3train.generation.environment_loop import EnvironmentLoop
from r3train.generation.sessions import Session, SessionSettings
from r3train.launch.job.checked_job import Job, stop_token_ids
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


def check_command(settings: AgentSection) -> None:
    """Raise ValueError where the command is not there, or one of its words is a file of this directory alone."""
    words = shlex.split(settings.agent_command)
    for place, word in enumerate(words):
        is_path = "/" in word or (place and Path(word).suffix)
        if is_path and not os.path.isabs(word) and os.path.isfile(word):
            raise ValueError(
                f"{settings.named}: {word} is not where the command runs, an empty directory for each session:"
                f" give {os.path.abspath(word)}"
            )
    if shutil.which(words[0]) is None:
        raise ValueError(f"{settings.named}: no such command")


def make_parser(config: RunConfig, tokenizer: Any) -> Parser:
    """Make what reads the answers' texts."""
    return Parser(
        config.agent.agent_tool_call_parser,
        config.agent.agent_reasoning_parser,
        tokenizer,
        config.data.apply_chat_template_kwargs,
    )


def session_settings(
    config: RunConfig, hf: HfModelFacts | None, tokenizer: Any, read: Read
) -> SessionSettings:
    """Make what the sessions of a job share; raises ValueError for a template that no way works for.

    hf: None where no model bounds the context.
    """
    most = config.rollout.rollout_max_context_len if hf is None else context_len(config, hf)
    return SessionSettings(
        template=SessionTemplate.of(ChatTemplate(tokenizer, config.data)),
        read=read,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        sampling=SamplingParams(config.rollout.rollout_max_response_len),
        max_context_len=most,
        history=config.agent.agent_history,
        max_calls=config.agent.agent_max_calls,
        max_answer_len=config.agent.agent_max_answer_len,
    )


def rehearse(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> tuple[str, ...]:
    """Import the agent and its parser, and play three turns without a server; return lines that say what came of it.

    Raises ValueError for an agent, a parser or a template that cannot be used.
    """
    settings = config.agent
    if settings.agent is not None:
        get_agent(settings.agent)
    else:
        check_command(settings)
    parser = make_parser(config, tokenizer)
    try:
        parser.check()
    finally:
        parser.close()
    shared = session_settings(config, hf, tokenizer, parser)
    template = shared.template
    stop = end_token(config, hf, tokenizer)
    uses_tools = template.no_tools is None
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    model = ScriptedModel(template, stop)

    def fail(error: BaseException) -> None:
        raise error

    # the template is tried, not the lengths of a run
    unbounded = {"sampling": SamplingParams(_LONG), "max_context_len": _LONG, "read": model.read}
    prompt = Prompt("rehearsal", 0, "", np.zeros(1, np.int32), None)
    session = Session(replace(shared, **unbounded), model.generate, prompt, 0, fail=fail)

    async def play() -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
        for _ in range(3):
            request = ChatRequest(list(messages), b"", (tool,) if uses_tools else ())
            model.decide(request)
            answer, commit = await session.answer(request)
            commit(True)
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


def end_token(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> int:
    """A token that ends an answer; raises ValueError where there is none."""
    for token in stop_token_ids(config, hf, tokenizer):
        return token
    named = config.agent.named
    raise ValueError(f"{named} needs a token that ends an answer: --rollout-stop-token-ids")


class ScriptedModel:
    """A model that calls each tool that a conversation offers once, with fitting arguments, and then says a text.

    stop: the token that ends its answers.  ``decide`` is called in the task that answers a request.
    """

    def __init__(self, template: SessionTemplate, stop: int) -> None:
        self._template, self._stop = template, stop
        self._left: ContextVar[tuple[Parsed, list[int]]] = ContextVar("left")

    def decide(self, request: ChatRequest) -> None:
        """Decide on the answer to a request."""
        calls = [call for m in request.messages for call in m.get("tool_calls") or ()]
        called = {call["function"]["name"] for call in calls}
        readable = request.tools if request.readable is None else request.readable
        new = [t["function"] for t in readable if t["function"]["name"] not in called]
        parsed = Parsed("That is all.")
        if new:
            schema = new[0].get("parameters") or {}
            arguments = json.dumps(fitting(schema, schema) if schema else {})
            parsed = Parsed("I call.", None, ({"name": new[0]["name"], "arguments": arguments},))
        text = self._written(parsed, request.tools)
        self._left.set((parsed, [*self._template.chat.encode(text), self._stop]))

    def _written(self, parsed: Parsed, tools: Sequence[dict[str, Any]]) -> str:
        """An answer as the template writes it, up to its end."""
        asks = {"role": "user", "content": "."}
        calls = [{"id": "call00001", "type": "function", "function": c} for c in parsed.calls]
        answer = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        try:
            before = self._template.whole_text([asks], tools)
            whole = self._template.whole_text([asks, answer, asks], tools)
        except ValueError:  # the session will say so
            return parsed.content
        stop = self._template.chat.tokenizer.decode([self._stop], skip_special_tokens=False)
        text, end, _ = whole.removeprefix(before).partition(stop)
        return text if whole.startswith(before) and end else parsed.content

    async def generate(self, sample: RolloutSample, limit: int) -> RolloutSample:
        """Say the next tokens of the answer."""
        left = self._left.get()[1]
        tokens, left[:limit] = left[:limit], []
        zeros = np.zeros(len(tokens))
        parts = np.array(tokens, np.int32), zeros.astype(np.float32), zeros.astype(np.int32)
        return stitch.extend(sample, Segment(*parts, None, 0, "length" if left else "stop"))

    async def read(self, text: str, tools: Any) -> Parsed:
        """Return the answer that was decided on; the text of one that was cut."""
        parsed, left = self._left.get()
        return Parsed(text) if left else parsed


def fitting(schema: Any, root: Mapping[str, Any]) -> Any:
    """A small value that fits a JSON schema, as far as its types and choices go; root: of its references.

    >>> schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {}}, "required": ["a"]}
    >>> fitting(schema, {"$defs": {"n": {"anyOf": [{"type": "integer", "minimum": 3}]}}})
    {'a': 3}
    """
    if not isinstance(schema, dict):
        return "x"
    if "$ref" in schema:
        path = schema["$ref"].removeprefix("#/").split("/")
        return fitting(reduce(lambda found, part: found.get(part, {}), path, root), root)
    for choices in ("enum", "examples"):
        if schema.get(choices):
            return schema[choices][0]
    for choices in ("anyOf", "oneOf", "allOf"):
        if schema.get(choices):
            # a reference may come back to here
            return fitting(min(schema[choices], key=lambda each: "$ref" in each), root)
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        given = schema.get("properties", {})
        names = schema.get("required", given if schema is root else ())
        return {name: fitting(given.get(name), root) for name in names}
    if kind == "array":
        return [fitting(schema.get("items"), root)] * schema.get("minItems", 0)
    number = schema.get("minimum", 1)
    simple = {"integer": number, "number": number, "boolean": True, "null": None}
    return schema.get("const", simple.get(kind, "x" * schema.get("minLength", 1)))


def make_agents(job: Job, run_dir: Path) -> Agents:
    """Make what the sessions of a run share; run_dir: of sessions.jsonl and the directories of commands."""
    settings, parser = job.config.agent, make_parser(job.config, job.tokenizer)

    def record(facts: Mapping[str, Any]) -> None:
        append_lines(run_dir / SESSIONS_FILE, [facts])

    sessions = session_settings(job.config, job.hf, job.tokenizer, parser)
    run, end = runner(settings, run_dir)
    return Agents(
        settings=settings,
        sessions=sessions,
        endpoint=make_chat_endpoint(settings, sessions.max_context_len),
        run=run,
        name=settings.named,
        record=record,
        close=parser.close,
        end=end,
        other_parsers=parser.others,
    )


def make_chat_endpoint(
    settings: AgentSection,
    max_context_len: int | None = None,
    kind: type[ChatEndpoint] = ChatEndpoint,
) -> ChatEndpoint:
    """Make the chat endpoint of all sessions; it belongs to the event loop that opens it."""
    key = os.environ.get("R3TRAIN_AGENT_OTHER_API_KEY")
    return kind(settings, other_key=key, max_model_len=max_context_len)


Run = Callable[[Access, Prompt, bytearray], Awaitable[Any]]


End = Callable[[], Awaitable[None]]


def runner(settings: AgentSection, run_dir: Path) -> tuple[Run, End | None]:
    """Return what lets the agent work on a prompt, and what ends workers; run_dir: of the directories of commands."""
    if settings.agent_command is None:
        return _function(settings), None
    command, room = shlex.split(settings.agent_command), run_dir / "agents"
    workers = Workers(settings, room)

    async def run(access: Access, prompt: Prompt, output: bytearray) -> Any:
        room.mkdir(exist_ok=True)
        task = {"prompt": prompt.content, "metadata": prompt.metadata}
        if settings.agent_workers is not None:
            return await workers.run(access, task, output)
        with TemporaryDirectory(dir=room, ignore_cleanup_errors=True) as directory:
            return await run_command(command, access, task, Path(directory), settings, output)

    return run, workers.end


def _function(settings: AgentSection) -> Run:
    """Return what runs the function of --agent in an event loop of its own, where it may block its like only."""
    function, loop = get_agent(settings.agent), EnvironmentLoop("--agent-timeout-s")
    # a line for each call of the model
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run(access: Access, prompt: Prompt, output: bytearray) -> Any:
        task = AgentTask(
            access.base_url,
            access.key,
            prompt.content,
            prompt.label,
            dict(prompt.metadata),
            access.model,
            access.session_url,
        )
        os.environ.update(no_proxy(os.environ, access.base_url))
        try:
            return await loop.ask(lambda: function(task), "the agent", settings.agent_timeout_s)
        except ValueError as error:
            raise AgentFailed(str(error)) from error

    return run

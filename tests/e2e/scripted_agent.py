"""An agent of three turns, by the unmodified openai client, and a parser that finds calls in any text."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI, NotFoundError

from r3train.chat.base import AgentTask, Parsed

TURNS = 3
# Of the sessions of a start the first so many make its first step.  Later ones (of ``every_other`` each second one) go
# on after their first turn when the file that this variable names has a line, such as that of a first weight update.
OF_FIRST_STEP = 16
WAITS_FOR = "SCRIPTED_AGENT_WAITS_FOR"
# Most tokens of a turn's answer, if not 6: updates and faults come in the middle of long ones.
TOKENS = "SCRIPTED_AGENT_TOKENS"
_numbers, _sessions = itertools.count(), itertools.count()
TOOLS = [{"type": "function", "function": {"name": "make", "parameters": {}}}]


def first_word_is_a_call(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
    """An answer with tools is a call with its first word; without it is text."""
    words = text.split()
    if not tools or not words:
        return Parsed(text)
    return Parsed(text, None, ({"name": "make", "arguments": json.dumps({"a": words[0]})},))


async def run(task: AgentTask, step: int = 1) -> float:
    """Reward: the share of answers' words that are the first one's, so that it varies."""
    client = _client(task)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    words: list[str] = []
    number, most = next(_numbers), int(os.environ.get(TOKENS, 6))
    for _ in range(TURNS):
        answer = await client.chat.completions.create(
            model="r3", messages=messages, tools=TOOLS, max_tokens=most, temperature=0.2
        )
        message = answer.choices[0].message
        words += (message.content or "").split()
        messages.append(message.model_dump(exclude_none=True))
        waits = number >= OF_FIRST_STEP and number % step == 0
        while waits and not _has_line(Path(os.environ[WAITS_FOR])):
            await asyncio.sleep(0.1)
        for call in message.tool_calls or ():
            said = json.loads(call.function.arguments)["a"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "please name some fruits"})
    return words.count(words[0]) / len(words) if words else 0.0


def _client(task: AgentTask) -> AsyncOpenAI:
    """A client that nobody closes; on a busy machine the SDK's 5 s are too few to connect in."""
    return AsyncOpenAI(base_url=task.base_url, api_key=task.key, max_retries=0, timeout=300)


def _has_line(file: Path) -> bool:
    return file.exists() and b"\n" in file.read_bytes()


async def branching(task: AgentTask, step: int = 1) -> float:
    """As ``run``; then two requests at once behind the first answer, and another history in another dialect."""
    reward = await run(task, step)
    client = _client(task)

    async def ask(*messages: dict[str, Any]) -> dict[str, Any]:
        answer = await client.chat.completions.create(model="r3", messages=messages, max_tokens=4)
        return answer.choices[0].message.model_dump(exclude_none=True)

    first = {"role": "user", "content": task.prompt}
    answer = await ask(first)
    await asyncio.gather(
        *(ask(first, answer, {"role": "user", "content": word}) for word in ("red", "fruits"))
    )
    await client.responses.create(model="r3", input="name", max_output_tokens=4)
    return reward


async def fails(task: AgentTask) -> float:
    """Fail after an answer and a request for what there is not."""
    async with _client(task) as client:
        messages = [{"role": "user", "content": task.prompt}]
        await client.chat.completions.create(model="r3", messages=messages, max_tokens=4)
        try:
            await client.embeddings.create(model="r3", input="x")
        except NotFoundError:
            raise RuntimeError("no embeddings") from None
    return 1.0


async def run_or_branch(task: AgentTask) -> float:
    """As ``run`` and as ``branching`` in turn."""
    return await (run if next(_sessions) % 2 else branching)(task)


async def every_other(task: AgentTask) -> float:
    """As ``branching``; each second session alone waits."""
    return await branching(task, 2)

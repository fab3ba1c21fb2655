"""An agent that does to its calls what harnesses do, in three dialects, and writes down each answer that it got.

A line of JSON for each session in the file that ``GOT`` names: the prompt, and the words of every answer, in any order.
An answer is written down once, however often it was asked for; one that nobody took is not.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from r3train.chat.base import AgentTask, Parsed

GOT = "DISORDERLY_AGENT_GOT"
# most tokens of an answer: the proxy holds requests for LEFT_EARLY tokens back, and those for HELD until the session is over
TOKENS, LEFT_EARLY, HELD = 6, 5, 7
TOOLS = [{"type": "function", "function": {"name": "make", "parameters": {}}}]
LEAVES_S = 0.2


def words_are_a_call(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
    """An answer with tools is a call with all its words; without them it is text."""
    if not tools:
        return Parsed(text)
    return Parsed("", None, ({"name": "make", "arguments": json.dumps({"a": text})},))


class _Harness:
    """One session's client: chat completions, messages and responses, and the words of each answer that came."""

    def __init__(self, task: AgentTask, http: aiohttp.ClientSession) -> None:
        self.prompt, self.http, self.base = task.prompt, http, task.base_url
        self.headers = {"Authorization": f"Bearer {task.key}"}
        self.got: list[str] = []

    async def _post(self, path: str, body: dict[str, Any], marked: bool = False) -> Any:
        headers = self.headers | ({"x-stainless-retry-count": "1"} if marked else {})
        async with self.http.post(f"{self.base}{path}", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    def body(self, *messages: Any, most: int = TOKENS, **more: Any) -> dict[str, Any]:
        return {"model": "r3", "messages": list(messages), "max_tokens": most, **more}

    async def chat(self, body: dict[str, Any], *, marked: bool = False, again: bool = False) -> Any:
        """Ask and return the message; again: for an answer that is written down already."""
        answer = await self._post("/chat/completions", body, marked)
        message = {k: v for k, v in answer["choices"][0]["message"].items() if v is not None}
        said = message.get("content") or ""
        for call in message.get("tool_calls", ()):
            said += json.loads(call["function"]["arguments"])["a"]
        if not again:
            self.got.append(said)
        return message

    async def leave(self, body: dict[str, Any]) -> None:
        """Ask and go away before the answer."""
        try:
            await asyncio.wait_for(self._post("/chat/completions", body), LEAVES_S)
        except TimeoutError:
            return
        raise AssertionError("the answer came before its client could leave")

    async def stream(self, body: dict[str, Any], *, cut: bool) -> None:
        """Read a stream to its end, or to its first text."""
        said = ""
        asked = body | {"stream": True}
        url = f"{self.base}/chat/completions"
        async with self.http.post(url, json=asked, headers=self.headers) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    said += choice["delta"].get("content") or ""
                if cut and said:
                    break
            if cut:
                response.close()
        self.got.append(said)

    async def messages(self, *messages: Any) -> str:
        answer = await self._post("/messages", self.body(*messages))
        said = "".join(part.get("text", "") for part in answer["content"])
        self.got.append(said)
        return said

    async def responses(self, text: str) -> None:
        asked = {"model": "r3", "input": text, "max_output_tokens": TOKENS}
        answer = await self._post("/responses", asked)
        parts = [part for item in answer["output"] for part in item.get("content", ())]
        self.got.append("".join(part.get("text", "") for part in parts))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def run(task: AgentTask) -> float:
    """Play one session; its reward is the share of different words."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        harness = _Harness(task, http)
        await _play(harness, _user(task.prompt))
    words = " ".join(harness.got).split()
    line = json.dumps({"prompt": task.prompt, "got": harness.got}) + "\n"
    with Path(os.environ[GOT]).open("a") as file:
        file.write(line)
    return len(set(words)) / max(1, len(words))


async def _play(harness: _Harness, first: dict[str, Any]) -> None:
    ask = harness.body
    answer = await harness.chat(ask(first))
    # two at once behind one answer, one of which is asked for twice
    twice = ask(first, answer, _user("red"))
    forks = harness.chat(twice), harness.chat(ask(first, answer, _user("fruits")))
    await asyncio.gather(*forks)
    await harness.chat(twice, marked=True, again=True)
    # its client leaves, and an equal request without a mark gets the answer
    late = ask(first, answer, _user("name"), most=LEFT_EARLY)
    await harness.leave(late)
    await harness.chat(late)
    # tools: a call, its result, and the same conversation without the tools
    called = await harness.chat(ask(first, tools=TOOLS))
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "count"}
    await harness.chat(ask(first, called, result, tools=TOOLS))
    # an answer that is edited
    await harness.chat(ask(first, {"role": "assistant", "content": "please"}, _user("red")))
    await harness.stream(ask(first, _user("some")), cut=False)
    await harness.stream(ask(first, _user("some"), _user("red")), cut=True)
    said = await harness.messages(first)
    await harness.messages(first, {"role": "assistant", "content": said}, _user("red"))
    await harness.responses("name")
    # nobody ever takes these
    await harness.leave(ask(first, _user("red"), most=HELD))
    await harness.leave(ask(first, answer, _user("count"), most=HELD))

"""A session for tests of the endpoint: it answers by a script and keeps what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from r3train.agents.http import Access, ChatEndpoint
from r3train.chat.base import ChatAnswer, ChatRequest
from r3train.config.agent_settings import AgentSection

TOOL = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object"}},
}


class Script:
    """Answers the number of the call, or the next of ``answers``; an exception among them is raised.

    ``may_answer`` holds answers back while it is clear.
    """

    def __init__(self, *answers: dict[str, Any] | Exception, begins: bool = False) -> None:
        self.answers = list(answers)
        self.begins = begins  # tells that a request is not refused any more
        self.requests: list[ChatRequest] = []
        self.deliveries: list[tuple[int, bool]] = []  # (call, whether its answer was delivered)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.cancelled = 0

    async def __call__(self, request: ChatRequest):
        number = len(self.requests)
        self.requests.append(request)
        if self.begins:
            request.begun()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer_fields = self.answers.pop(0) if self.answers else {"content": str(number)}
        if isinstance(answer_fields, Exception):
            raise answer_fields
        message = {"role": "assistant", **answer_fields}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return ChatAnswer(message, reason, 7, 5), lambda kept: self.deliveries.append(
            (number, kept)
        )


@asynccontextmanager
async def opened(script: Any, **settings: Any) -> AsyncIterator[tuple[ChatEndpoint, Access]]:
    """A chat endpoint with one session that ``script`` answers; settings: of ``ChatEndpoint``, and --agent-NAME as NAME."""
    names = settings.keys() & {"idle_s", "other_key", "max_model_len"}
    further = {name: settings.pop(name) for name in names}
    section = AgentSection(**{f"agent_{name}": value for name, value in settings.items()})
    endpoint = ChatEndpoint(section, **further)
    try:
        yield endpoint, await endpoint.open(script)
    finally:
        await endpoint.stop()


async def until(holds) -> None:
    """Wait until ``holds()``; the test's own limit ends a wait in vain."""
    while not holds():
        await asyncio.sleep(0.01)

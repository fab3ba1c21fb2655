"""A call of a chat endpoint between its dialect (OpenAI's two, Anthropic's) and the session that answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for an answer, checked by its dialect; messages and tools have OpenAI's chat form.

    Sampling is the run's: what a harness asks for of it is in ``ignored`` and has no effect.

    >>> ChatRequest(messages=[{"role": "user", "content": "hi"}], digest=b"\\x00" * 16).max_tokens is None
    True
    """

    messages: Sequence[Message]  # at least one, the last one not the assistant's
    digest: bytes  # 16 bytes of the body: equal for a client's retry of the same request
    tools: Sequence[dict[str, Any]] = ()  # function schemas
    max_tokens: int | None = None  # bounds this answer, at least 1
    stop: tuple[str, ...] = ()  # texts at which the answer ends
    retry: int = 0  # the client's own count of its retries (x-stainless-retry-count), 0 without
    ignored: tuple[str, ...] = ()  # names of the fields that were given and have no effect
    readable: Sequence[dict[str, Any]] | None = None  # tools whose calls are read; None: all
    # variables of the chat template: refused where they write the request otherwise
    template_values: Mapping[str, Any] = field(default_factory=dict)
    begun: Callable[[], None] = lambda: None  # told when it is not refused any more


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to a request; ``message`` has role, content, and if present reasoning_content and tool_calls.

    A call's arguments are JSON text, as OpenAI has them.
    """

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    stop_text: str | None = None  # the request's that ended it


class ChatRefused(Exception):
    """A request that gets no answer: HTTP status, OpenAI's error code and one line for the client.

    400 invalid_request_error or context_length_exceeded; 401 invalid_api_key; 403 session_over; 408 late_body: clients
    ask once more for 408, 409, 429 and 5xx only.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AgentFailed(Exception):
    """An agent that raised, exited with an error, took too long, or never called the model; its text is one line.

    reward: given nevertheless; it counts where the session had come to the end of its calls or its context.
    """

    def __init__(self, why: str, reward: Any = None) -> None:
        super().__init__(why)
        self.reward = reward


class BadReward(AgentFailed):
    """An agent whose reward is none."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of an agent's function: its row of the data, and the chat endpoint that is its model.

    The endpoint speaks OpenAI's and Anthropic's APIs; the model is --agent-model, or r3train.  It counts as one
    session by its key.
    """

    base_url: str
    key: str
    prompt: Any  # the row's text, or its messages in OpenAI's form
    label: Any
    metadata: dict[str, Any]
    model: str = "r3train"  # the name of the policy
    session_url: str = ""  # a base_url that needs no key


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parts of an answer's text: the content shown, the reasoning before it, and the calls of tools.

    A call is {"name": str, "arguments": JSON text}.  ids: the form of the calls' ids, of {name} and {index}, the
    call's place among all of the conversation; None: ids at random.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[dict[str, str], ...] = ()
    ids: str | None = None


# (text with special tokens but without the stop token, the request's tools) -> what it holds
Parse = Callable[[str, Sequence[dict[str, Any]]], Parsed]
# the same for an event loop
Read = Callable[[str, Sequence[dict[str, Any]]], Awaitable[Parsed]]

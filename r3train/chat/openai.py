"""OpenAI's chat dialect: bodies of /v1/chat/completions read, answers and errors written."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from r3train.chat.base import ChatAnswer, ChatRefused, ChatRequest
from r3train.chat.messages import checked_messages, checked_tools, shown_as_text
from r3train.user_code import quoted

# By field: the values that ask for nothing, and why others are refused.
Fields = dict[str, tuple[tuple[Any, ...], str]]

# Fields that no answer can follow.
_REFUSED: Fields = {
    "modalities": ((None, ["text"]), "only text is supported"),
    "audio": ((None,), "only text is supported"),
    "functions": ((None, []), "give tools"),
    "function_call": ((None,), "give tools"),
}
# Fields that change what a harness gets: refused with --agent-strict, else without effect.
_STRICT: Fields = {
    "n": ((None, 1), "one answer per request; ask again for another"),
    "response_format": ((None, {"type": "text"}), "answers are free text"),
    "logit_bias": ((None, {}), "sampling is the run's"),
    "presence_penalty": ((None, 0), "sampling is the run's"),
    "frequency_penalty": ((None, 0), "sampling is the run's"),
    "web_search_options": ((None,), "tools are the harness's"),
}
# Fields without effect, and the values of them that ask for nothing else.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (None,),
    "top_p": (None,),
    "top_k": (None,),
    "min_p": (None,),
    "seed": (None,),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prediction": (None,),
}
# Fields that are read here, and the accounting of OpenAI's that no answer depends on.
_OTHERS = frozenset(
    "model messages tools max_tokens max_completion_tokens stop stream stream_options metadata user store"
    " service_tier safety_identifier prompt_cache_key prompt_cache_retention chat_template_kwargs"
    " enable_thinking".split()
)
_FORM = frozenset("stream stream_options metadata client_metadata".split())  # of no answer
_MOST_STOPS = 16
_MOST_DEPTH = 100  # what reads a value recursively must not end the run
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request and the form in which its answer goes back."""

    request: ChatRequest
    model: str  # the name that the client gave, for its answer
    stream: bool = False
    include_usage: bool = False  # of a stream
    number: str = field(default_factory=lambda: secrets.token_hex(12))  # of the answer's id
    created: int = field(default_factory=lambda: int(time.time()))


def read_request(body: bytes, retry_header: str | None = None, strict: bool = False) -> ChatCall:
    """Read a body of /v1/chat/completions; raises ChatRefused (400) with one line for the client.

    retry_header: the value of x-stainless-retry-count, with which OpenAI's clients mark their retries.  strict: of
    --agent-strict.
    """
    fields = json_object(body)
    refuse(fields, _REFUSED)
    options = fields.get("stream_options")
    if not isinstance(options, (dict, type(None))):
        raise _refused(f"stream_options {quoted(options)}: expected a table")
    bounds = [count_of(fields, name) for name in ("max_completion_tokens", "max_tokens")]
    choice = fields.get("tool_choice")
    named = choice.get("function") if isinstance(choice, dict) else None
    call = made_call(
        fields,
        fields.get("messages"),
        fields.get("tools"),
        max_tokens=min((bound for bound in bounds if bound is not None), default=None),
        stop=stop_texts(fields.get("stop"), "stop"),
        retry=retries_of(retry_header),
        strict=_STRICT if strict else None,
        ignored=ignored_fields(fields, _IGNORED, _STRICT, _OTHERS | _REFUSED.keys()),
        choice="none" if choice == "none" else named,
    )
    return replace(call, include_usage=switch(options or {}, "include_usage"))


def made_call(
    fields: dict[str, Any],
    messages: Any,
    tools: Any,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
    retry: int,
    strict: Fields | None,
    ignored: Sequence[str],
    choice: Any,
) -> ChatCall:
    """A call of any dialect, with messages and tools in OpenAI's form; raises ChatRefused (400).

    strict: what --agent-strict refuses, None without it.  choice: "none", or a table with the name of the one tool
    that the answer may call.
    """
    if strict is not None:
        refuse(fields, strict)
    elif shown_as_text(messages):
        ignored = [*ignored, "pictures"]
    tools = checked_tools(tools)
    readable = [] if choice == "none" else None
    if isinstance(choice, dict):
        ignored = [name for name in ignored if name != "tool_choice"]
        readable = [tool for tool in tools if tool["function"]["name"] == choice.get("name")]
        if not readable:
            raise _refused(f"tool_choice {quoted(choice)}: no tool has this name")
    model = fields.get("model")
    if not isinstance(model, (str, type(None))):
        raise _refused(f"model {quoted(model)}: expected text")
    values = fields.get("chat_template_kwargs") or {}
    if not isinstance(values, dict):
        raise _refused(f"chat_template_kwargs {quoted(values)}: expected a table")
    if fields.get("enable_thinking") is not None:
        values = values | {"enable_thinking": fields["enable_thinking"]}
    request = ChatRequest(
        messages=checked_messages(messages),
        digest=_digest(fields),
        tools=tools,
        max_tokens=max_tokens,
        stop=stop,
        retry=retry,
        ignored=tuple(ignored),
        readable=readable,
        template_values=values,
    )
    return ChatCall(request, model=model or "r3train", stream=switch(fields, "stream"))


def answer_json(answer: ChatAnswer, call: ChatCall) -> bytes:
    """An answer as the body that OpenAI's API gives."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return orjson.dumps(
        _head("chat.completion", call) | {"choices": [choice], "usage": _usage(answer)}
    )


def answer_events(answer: ChatAnswer, call: ChatCall) -> bytes:
    """A whole answer as server-sent events: the message, its end, the usage if asked for, and [DONE]."""
    head = _head("chat.completion.chunk", call)
    parts = [head | {"choices": [choice]} for choice in _choices(answer)]
    if call.include_usage:
        parts.append(head | {"choices": [], "usage": _usage(answer)})
    return b"".join(b"data: %s\n\n" % part for part in (*map(orjson.dumps, parts), b"[DONE]"))


PING = b": ping\n\n"


def begin_events(call: ChatCall) -> bytes:
    """The first events of a stream, as ``answer_events`` begins: none."""
    return b""


def error_event(refused: ChatRefused, call: ChatCall) -> bytes:
    """A refusal in a stream that has begun."""
    return b"data: %s\n\n" % error_json(refused)


def error_json(refused: ChatRefused) -> bytes:
    """A refusal in the form of OpenAI's errors."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
    return orjson.dumps({"error": error})


def _digest(fields: dict[str, Any]) -> bytes:
    """16 bytes that a client's later tries share; one that gives up a stream may ask for JSON."""
    asked = {name: value for name, value in fields.items() if name not in _FORM}
    return hashlib.blake2b(orjson.dumps(asked), digest_size=16).digest()


def json_object(body: bytes) -> dict[str, Any]:
    """The fields of a body; raises ChatRefused (400) for what is no JSON object, or nested too deep."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _refused(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _refused(f"the body is {quoted(fields)}, expected a JSON object")
    level: list[Any] = [fields]
    for _ in range(_MOST_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, (dict, list))]
        if not level:
            return fields
    raise _refused(f"the body is nested deeper than {_MOST_DEPTH}")


def refuse(fields: dict[str, Any], table: Fields) -> None:
    """Raise ChatRefused (400) for the first field that asks for more than the table's harmless values."""
    for name, (harmless, why) in table.items():
        if not _is_one_of(fields.get(name), harmless):
            raise _refused(f"{name} {quoted(fields[name])} is not supported: {why}")


def stop_texts(value: Any, name: str) -> tuple[str, ...]:
    """The texts that end an answer; raises ChatRefused (400)."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _refused(f"{name} {quoted(value)}: expected a text or a list of texts, none empty")
    if len(texts) > _MOST_STOPS:
        raise _refused(f"{name}: {len(texts)} texts, expected at most {_MOST_STOPS}")
    return tuple(texts)


def switch(fields: dict[str, Any], name: str) -> bool:
    """A field that is true, false or absent; raises ChatRefused (400)."""
    value = fields.get(name)
    if not isinstance(value, (bool, type(None))):
        raise _refused(f"{name} {quoted(value)}: expected true or false")
    return bool(value)


def count_of(fields: dict[str, Any], name: str) -> int | None:
    """A field that is a whole number of at least 1 or absent; raises ChatRefused (400)."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(f"{name} {quoted(value)}: expected a whole number of at least 1")
    return value


def retries_of(header: str | None) -> int:
    """The client's count of its retries; what is no number is no mark."""
    return int(header) if header and len(header) < 5 and header.isdecimal() else 0


def ignored_fields(
    fields: dict[str, Any],
    ignored: dict[str, tuple[Any, ...]],
    strict: Fields,
    known: Collection[str],
) -> list[str]:
    """The names of fields that ask for what has no effect; "other" for those that are no names.

    ignored, strict: names, with the values that ask for nothing.  known: names of all others.
    """
    harmless = ignored | {name: values for name, (values, _) in strict.items()}
    names = [name for name, values in harmless.items() if not _is_one_of(fields.get(name), values)]
    unknown = [n for n in fields if n not in known and n not in harmless and fields[n] is not None]
    unknown = [name if _NAME.fullmatch(name) else "other" for name in unknown]
    return names + unknown[:8] + ["other"] * (len(unknown) > 8)


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """True for a JSON value among others; 1 and true are two."""
    same_kind = (
        choice for choice in accepted if isinstance(value, bool) == isinstance(choice, bool)
    )
    return any(value == choice for choice in same_kind)


def _head(kind: str, call: ChatCall) -> dict[str, Any]:
    name = f"chatcmpl-{call.number}"
    return {"id": name, "object": kind, "created": call.created, "model": call.model}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _choices(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    delta = dict(answer.message)
    calls = delta.pop("tool_calls", ())
    # a call a piece: some clients read the first of a piece only
    more = [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    for part, reason in (*((part, None) for part in (delta, *more)), ({}, answer.finish_reason)):
        yield {"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}


def _refused(text: str) -> ChatRefused:
    return ChatRefused(400, "invalid_request_error", text)

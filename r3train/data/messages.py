"""Messages and tools of rows and environments: read as agents' requests are, and compared with their rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from r3train.chat.base import ChatRefused, Message
from r3train.chat.messages import checked_message, checked_tools, plain
from r3train.user_code import quoted

# keys of a message that count; a chat template may read others
FIELDS = {"role", "content", "name", "tool_call_id", "reasoning_content", "tool_calls", "weight"}
NOTHING = (None, "", [], {})
# a list of messages as str() writes it
_PRINTED = re.compile(r"\s*(array\()?\[\s*\{\s*(?=')(?=.*'(role|from)'\s*:)", re.DOTALL)


def messages_in(text: str) -> list[Any] | None:
    """The messages that a text holds as JSON; None for a text that is a prompt itself.

    Raises ValueError for a table of JSON with messages, and for messages as Python prints them.
    """
    if _PRINTED.match(text):
        raise ValueError("messages as Python prints them, expected JSON or a list")
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        return value if any(map(_is_like_message, value)) else None
    if _is_like_message(value) or isinstance(value.get("messages"), list):
        raise ValueError("the JSON text of a table, expected that of a list of messages")
    return None


def _is_like_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or {"from", "value"} <= value.keys())


def read_messages(
    value: Any, reads: Callable[[str], bool] = lambda name: False
) -> tuple[list[Message], list[tuple[int, str]]]:
    """Messages with the fields that count, and the (0-based number, key) of each that does not.

    Content is text, arguments are JSON text of an object, weight is there where it is 0.  reads: tells
    whether the chat template reads a key, which then stays.  Keys without a value do not count at all.
    Raises ValueError naming the message, counted from 1, for all that is no text chat.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "hi"}], "id": 7}])
    ([{'role': 'system', 'content': 'hi'}], [(0, 'id')])
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"got {quoted(value)}, expected a list of messages with role and content")
    messages, unknown = [], []
    for index, given in enumerate(value):
        try:
            message = _read_message(given)
        except (ChatRefused, RecursionError, ValueError) as error:
            raise ValueError(f"message {index + 1}: {error}") from None
        extra = sorted(key for key in given.keys() - FIELDS if given[key] not in NOTHING)
        message |= {key: without_nulls(given[key]) for key in extra if reads(key)}
        unknown += [(index, key) for key in extra if not reads(key)]
        messages.append(message)
    return messages, unknown


def _read_message(given: Any) -> Message:
    if isinstance(given, dict):
        given = {**given, "tool_calls": without_nulls(given.get("tool_calls"))}
    message = checked_message(given)
    if message["role"] == "developer":
        message["role"] = "system"
    role, calls, weight = message["role"], message.get("tool_calls", ()), given.get("weight")
    if given.get("content") is None and not calls:
        state = "null" if "content" in given else "missing"
        raise ValueError(f"content is {state}, expected text (role {role}, no calls)")
    for call in plain(message, "table").get("tool_calls", ()):
        text = call["function"]["arguments"]
        if not isinstance(text, dict):
            raise ValueError(
                f"a call's arguments {quoted(text)}: expected a table or its JSON text"
            )
    if weight is not None and (role != "assistant" or weight not in (0, 1)):
        raise ValueError(f"weight {quoted(weight)} (role {role}): expected 0 or 1, the assistant's")
    return {**message, "weight": 0} if weight == 0 else message


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a row, a list or its JSON text; None without any.

    Raises ValueError and ChatRefused for anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
    else:
        value = without_nulls(value)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"got {type(value).__name__}, expected a list of tools")
    return checked_tools(value) or None


def without_nulls(value: Any) -> Any:
    """A value of a file without the nulls of its tables, at every depth.

    Arrow gives every table the keys of all in its column, and ``datasets`` writes them to .jsonl too: a
    null that was meant cannot be told apart.  JSON text keeps its nulls.
    """
    is_map = isinstance(value, list) and value and isinstance(value[0], tuple)  # Arrow's
    if is_map or isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in dict(value).items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def left_out(
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    trained: Collection[int] = (),
) -> str | None:
    """The part that a rendering lacks, in words: a message's text or call, or a tool; None where all is there.

    Each text is looked for outside of the others', the longest first; a template may trim it, or write it as
    JSON.  Thoughts of an answer may be left out, unless it is among the ``trained``, 0-based.
    """
    for words, what in sorted(_wanted(messages, tools, trained), key=lambda one: -len(one[0])):
        as_json = (json.dumps(words, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        found = next((form for form in chain((words,), as_json) if form in text), None)
        if found is not None:
            text = text.replace(found, "\0", 1)
        elif "".join(words.split()) not in "".join(text.split()):
            return f"the chat template leaves out {what} {quoted(words)}"
    return None


def _wanted(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], trained: Collection[int]
) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(messages):
        where, content = f"message {index + 1} (role {message['role']})", message["content"]
        if message["role"] == "assistant" and index not in trained:
            content = content.rpartition("</think>")[2]
        if content.strip():
            yield content.strip(), f"{where}:"
        if index in trained and message.get("reasoning_content"):
            yield message["reasoning_content"].strip(), f"{where}: its reasoning_content"
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"], f"{where}: its call of"
    for tool in tools:
        yield tool["function"]["name"], "the tool"

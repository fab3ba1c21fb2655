"""Messages of a chat: when two are one, their text, and the form that chat templates take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from r3train.chat.base import ChatRefused, Message
from r3train.user_code import quoted

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_PICTURES = ("image", "image_url", "input_image")
# what parsers of calls look for, and a call's arguments as JSON
_CALL_MARKS = (
    r"(?i:tool[_▁]?call|function_?call|<function|<invoke|python_tag|START_ACTION|action_start)"
    r"|to=functions|\"(?:arguments|parameters)\"\s*:"
)
# of a conversation that people are shown: messages, and characters of a text
_FIRST_SHOWN, _LAST_SHOWN, _TEXT_SHOWN = 4, 20, 1000
_UNSEEN = "[a picture, which this model cannot see]"


def message_key(message: Message) -> bytes:
    """16 bytes that are equal for two messages that are one.

    Role, text, calls (id, name, arguments by value) and the id of the call that a result answers count.
    No content, None and "" are one.  Reasoning, names and fields of providers do not count: harnesses
    drop them.  Raises ChatRefused for content that is no text.

    >>> same = {"role": "user", "content": [{"type": "text", "text": "hi"}], "provider_fields": {}}
    >>> message_key(same) == message_key({"role": "user", "content": "hi"})
    True
    """
    calls = [
        [call.get("id"), call["function"]["name"], _by_value(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    parts = [
        _role(message["role"]),
        text_of(message.get("content")),
        calls,
        message.get("tool_call_id"),
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


def text_of(content: Any) -> str:
    """The text of a message's content: "" for None; the parts of a list on lines of their own.

    Raises ChatRefused (400) for pictures, audio and what is no content.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refused(f"content {quoted(content)}: expected text or a list of text parts")
    return "\n".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        raise _refused(f"a part {quoted(part)} of a content: expected a table with type and text")
    if part.get("type") not in _TEXT_PARTS:
        raise _refused(
            f"a part of type {quoted(part.get('type'))} in a content: only text is supported"
        )
    if not isinstance(part.get("text"), str):
        raise _refused(f"a part of text with the text {quoted(part.get('text'))}: expected text")
    return part["text"]


def shown_as_text(messages: Any) -> bool:
    """Put a text in the place of each picture in messages that are not checked yet; tell whether there was one."""
    found = False
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in _PICTURES:
                content[index], found = {"type": "text", "text": _UNSEEN}, True
    return found


def looks_like_call(text: str, tools: Sequence[dict[str, Any]]) -> bool:
    """Tell whether an answer looks like a call of a tool, in whatever form.

    >>> tools = [{"type": "function", "function": {"name": "add"}}]
    >>> looks_like_call('<tool_call>{"name": "add"}', tools), looks_like_call("I add them.", tools)
    (True, False)
    """
    names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    return bool(tools) and re.search(rf"{_CALL_MARKS}|\b(?:{names})\s*[({{]", text) is not None


def shown(messages: Sequence[Message]) -> list[str]:
    """A conversation as people read it, a text for each message: thoughts in brackets, and calls.

    Of a long text the beginning is shown, of many messages the first and the last; the number left out is said.

    >>> call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    >>> shown([{"role": "user", "content": "Add."}, {"role": "assistant", "content": None, "tool_calls": [call]}])
    ['user: Add.', 'assistant: calls add {"a": 1}']
    """
    texts = []
    for message in messages:
        thoughts = f"({message['reasoning_content']})" if message.get("reasoning_content") else ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        called = [f"calls {call['name']} {call['arguments']}" for call in calls]
        parts = (thoughts, text_of(message.get("content")), *called)
        text = f"{message['role']}: " + "\n".join(filter(None, parts))
        left = len(text) - _TEXT_SHOWN
        texts.append(f"{text[:_TEXT_SHOWN]}... ({left:,} more characters)" if left > 0 else text)
    if (left := len(texts) - _FIRST_SHOWN - _LAST_SHOWN) > 0:
        texts[_FIRST_SHOWN:-_LAST_SHOWN] = [f"({left} messages are left out)"]
    return texts


def plain(message: Message, arguments: Literal["text", "table"]) -> Message:
    """A message as chat templates take it: content as text, and its calls' arguments in one form.

    Most templates want arguments as a table; DeepSeek-V3's wants text.  None, blank text and that of null are {};
    arguments that are no JSON object stay text.  The developer's role is the system's.  Reasoning stays,
    fields of providers do not.
    """
    made: Message = {"role": _role(message["role"]), "content": text_of(message.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name):
            made[name] = message[name]
    calls = [
        _call(call, _in_form(call["function"].get("arguments"), arguments))
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        made["tool_calls"] = calls
    return made


def checked_messages(value: Any) -> list[Message]:
    """Messages of a request's body with the fields that count only, content as text, arguments as JSON text.

    Raises ChatRefused (400), naming the message, for all that OpenAI's form of text chats does not have.
    """
    if not isinstance(value, list) or not value:
        raise _refused(f"messages {quoted(value)}: expected a list of messages")
    made = []
    for index, message in enumerate(value):
        try:
            made.append(checked_message(message))
        except ChatRefused as refused:
            raise _refused(f"messages[{index}]: {refused}") from None
    if made[-1]["role"] == "assistant":
        raise _refused("messages: the last one is the assistant's, expected one that it answers")
    return made


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Tools of a request's body, unchanged; raises ChatRefused (400) for what is no function's schema."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise _refused(f"tools {quoted(value)}: expected a list of tools")
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _refused(f'{where} {quoted(tool)}: expected a table of type "function"')
        function = tool.get("function")
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise _refused(f"{where}.function {quoted(function)}: expected a table with a name")
        if not isinstance(function.get("parameters"), (dict, type(None))):
            parameters = quoted(function["parameters"])
            raise _refused(f"{where}.function.parameters {parameters}: expected a JSON schema")
    return value


def checked_message(message: Any) -> Message:
    """A message with the fields that count only; raises ChatRefused as ``checked_messages`` does."""
    if not isinstance(message, dict):
        raise _refused(f"{quoted(message)}: expected a table with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise _refused(f"role {quoted(role)}: expected one of {', '.join(_ROLES)}")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise _refused(f"{name} is not supported")
    made: Message = {"role": role, "content": text_of(message.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        field = message.get(name)
        if not isinstance(field, (str, type(None))):
            raise _refused(f"{name} {quoted(field)}: expected text")
        if field:
            made[name] = field
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, type(None))):
        raise _refused(f"tool_calls {quoted(calls)}: expected a list of calls")
    if calls and role != "assistant":
        raise _refused(f"tool_calls in a message of role {role}: expected in the assistant's only")
    if calls:
        made["tool_calls"] = [_checked_call(call) for call in calls]
    return made


def _checked_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise _refused(f"a call {quoted(call)}: expected a table with a function and its name")
    if not isinstance(call.get("id"), (str, type(None))):
        raise _refused(f"a call's id {quoted(call['id'])}: expected text")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise _refused(f"a call's arguments {quoted(arguments)}: expected a table or its JSON text")
    try:
        text = _in_form(arguments, "text")
    except RecursionError:
        raise _refused("a call's arguments are nested too deep") from None
    except TypeError as error:  # a date of parquet
        raise _refused(f"a call's arguments {quoted(arguments)} are no JSON: {error}") from None
    return _call(call, text)


def _call(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """A call with its arguments in another form, and its id if it has one."""
    made = {
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }
    return made if call.get("id") is None else {"id": call["id"], **made}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _by_value(arguments: Any) -> list[Any]:
    """Arguments as what compares by value: 1.0 is 1, as JavaScript writes it; other text is itself."""
    text = _in_form(arguments, "text")
    try:
        return ["value", json.loads(text, parse_float=_number)]
    except (ValueError, RecursionError):
        return ["text", text]


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _in_form(arguments: Any, form: Literal["text", "table"]) -> Any:
    if arguments is None or isinstance(arguments, str) and arguments.strip() in ("", "null"):
        arguments = {}
    if form == "text":
        if isinstance(arguments, str):
            return arguments
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, dict):
        return arguments
    try:
        orjson.loads(arguments)  # it refuses what no tokenizer takes: halves of surrogate pairs
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _refused(text: str) -> ChatRefused:
    return ChatRefused(400, "invalid_request_error", text)

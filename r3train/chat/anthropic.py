"""Anthropic's dialect: bodies of /v1/messages read, answers and errors written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson

from r3train.chat.base import ChatAnswer, ChatRefused, Message
from r3train.chat.messages import checked_tools
from r3train.chat.openai import (
    ChatCall,
    count_of,
    Fields,
    ignored_fields,
    json_object,
    made_call,
    retries_of,
    stop_texts,
)
from r3train.user_code import quoted

_IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (None,),
    "top_p": (None,),
    "top_k": (None,),
    "tool_choice": (None, {"type": "auto"}, {"type": "none"}),
    "thinking": (None,),
}
_STRICT: Fields = {
    "output_config.format": ((None,), "answers are free text"),
    "output_format": ((None,), "answers are free text"),
}
_OTHERS = frozenset(
    "model messages system tools max_tokens stop_sequences stream metadata service_tier output_config"
    " context_management".split()
)
# a text of Claude Code for Anthropic's servers, with a nonce: each request would begin another conversation
_BILLING = "x-anthropic-billing-header:"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ERRORS |= {413: "request_too_large"}


def read_request(body: bytes, retry_header: str | None = None, strict: bool = False) -> ChatCall:
    """Read a body of /v1/messages or count_tokens; raises ChatRefused (400) with one line for the client.

    retry_header: the value of x-stainless-retry-count, with which Anthropic's clients mark their retries.  strict: of
    --agent-strict.
    """
    fields = json_object(body)
    has_billing = _without_billing(fields)
    if isinstance(config := fields.get("output_config"), dict):
        fields["output_config.format"] = config.get("format")
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    tools, deferred = _tools(fields.get("tools"))
    call = made_call(
        fields,
        _messages(fields, {tool["function"]["name"]: tool for tool in checked_tools(deferred)}),
        tools,
        max_tokens=count_of(fields, "max_tokens"),
        stop=stop_texts(fields.get("stop_sequences"), "stop_sequences"),
        retry=retries_of(retry_header),
        strict=_STRICT if strict else None,
        ignored=ignored_fields(fields, _IGNORED, _STRICT, _OTHERS)
        + ["billing_header"] * has_billing,
        choice="none" if kind == "none" else choice if kind == "tool" else None,
    )
    if not deferred or call.request.readable is not None:
        return call
    return replace(call, request=replace(call.request, readable=[*tools, *deferred]))


def _without_billing(fields: dict[str, Any]) -> bool:
    """Leave the blocks of Claude Code's billing out of the system's text; tell whether there was one."""
    blocks = fields.get("system")
    if not isinstance(blocks, list):
        return False
    texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
    is_left_out = [isinstance(text, str) and text.startswith(_BILLING) for text in texts]
    fields["system"] = [block for block, left_out in zip(blocks, is_left_out) if not left_out]
    return any(is_left_out)


def answer_json(answer: ChatAnswer, call: ChatCall) -> bytes:
    """An answer as the body that Anthropic's API gives."""
    made = {"content": list(_blocks(answer)), "usage": _usage(answer)}
    return orjson.dumps(_head(call) | made | _end(answer))


def answer_events(answer: ChatAnswer, call: ChatCall) -> bytes:
    """A whole answer as server-sent events: its beginning, each block in one piece, its end."""
    return begin_events(call) + b"".join(map(_written, _events(answer)))


def _written(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))


_NO_END = {"stop_reason": None, "stop_sequence": None}
# some clients give up a stream in which nothing but pings comes
PING = _written({"type": "ping"}) + _written(
    {"type": "message_delta", "delta": _NO_END, "usage": {"output_tokens": 0}}
)


def begin_events(call: ChatCall) -> bytes:
    """The first events of a stream, as ``answer_events`` begins."""
    return _written({"type": "message_start", "message": _head(call)})


def error_event(refused: ChatRefused, call: ChatCall) -> bytes:
    """A refusal in a stream that has begun."""
    return b"event: error\ndata: %s\n\n" % error_json(refused)


def count_json(tokens: int) -> bytes:
    """The answer to count_tokens."""
    return orjson.dumps({"input_tokens": tokens})


def error_json(refused: ChatRefused) -> bytes:
    """A refusal in the form of Anthropic's errors."""
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    if refused.status >= 500:
        kind = "api_error"
    text = str(refused)
    if refused.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"  # clients go by these words
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": text}})


def _messages(fields: dict[str, Any], deferred: dict[str, Any]) -> list[Message]:
    """The messages in OpenAI's form, the system's first; ``deferred`` tools where results refer to them."""
    value = fields.get("messages")
    if not isinstance(value, list):
        raise _refused(f"messages {quoted(value)}: expected a list of messages")
    made: list[Message] = []
    if fields.get("system"):
        made.append({"role": "system", "content": fields["system"]})
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role == "system":  # newer clients write their reminders so
            made.append({"role": "system", "content": message.get("content")})
            continue
        if role not in ("user", "assistant"):
            raise _refused(
                f"{where} {quoted(message)}: expected a table of role user, assistant or system"
            )
        blocks = message.get("content")
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise _refused(f"{where}.content {quoted(blocks)}: expected text or a list of blocks")
        if role == "user":
            made += _users(blocks, where, deferred)
        else:
            made.append(_assistants(blocks, where))
    return made


def _users(blocks: list[dict[str, Any]], where: str, deferred: dict[str, Any]) -> Iterator[Message]:
    """Results of tools as messages of their own, and the text between them."""
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)  # what is no text is refused with its type
            continue
        if texts:
            yield {"role": "user", "content": texts}
            texts = []
        if not isinstance(block.get("tool_use_id"), str):
            raise _refused(
                f"{where}: a tool_result with tool_use_id {quoted(block.get('tool_use_id'))}"
            )
        content = block.get("content")
        if isinstance(content, list):
            content = [_tool_shown(part, deferred) for part in content]
        yield {"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]}
    if texts or not blocks:
        yield {"role": "user", "content": texts}


def _tool_shown(part: Any, deferred: dict[str, Any]) -> Any:
    """A part of a result; a reference to a tool as the text of its schema."""
    name = part.get("tool_name") if isinstance(part, dict) else None
    if not isinstance(name, str) or part.get("type") != "tool_reference":
        return part
    return {"type": "text", "text": orjson.dumps(deferred.get(name, name)).decode()}


def _assistants(blocks: list[dict[str, Any]], where: str) -> Message:
    made: Message = {"role": "assistant", "content": [], "tool_calls": []}
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise _refused(f"{where}: a tool_use with input {quoted(block.get('input'))}")
            function = {"name": block.get("name"), "arguments": block["input"]}
            made["tool_calls"].append({"id": block.get("id"), "function": function})
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise _refused(f"{where}: a thinking block {quoted(block)}: expected text")
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            made["content"].append(block)
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    return made


def _tools(value: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Tools in OpenAI's form, and those that are shown when a result refers to them; servers' own are refused."""
    if not isinstance(value, list):
        return value, []
    shown: list[dict[str, Any]] = []
    deferred: list[dict[str, Any]] = []
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise _refused(f"tools[{index}] {quoted(tool)}: expected a tool of the client's own")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        place = deferred if tool.get("defer_loading") is True else shown
        place.append({"type": "function", "function": function})
    return shown, deferred


def _head(call: ChatCall) -> dict[str, Any]:
    return {
        "id": f"msg_{call.number}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},  # the end of a stream has them
    }


def _end(answer: ChatAnswer) -> dict[str, Any]:
    stopped = answer.stop_text is not None and answer.finish_reason == "stop"
    reason = "stop_sequence" if stopped else _REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stop_text if stopped else None}


def _blocks(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    message = answer.message
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = orjson.loads(function["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}


def _events(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    for index, block in enumerate(_blocks(answer)):
        empty, delta = _parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)}
    yield {"type": "message_stop"}


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A block with nothing in it, and the piece that fills it."""
    if block["type"] == "tool_use":
        piece = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        return block | {"input": {}}, piece
    name = block["type"]  # of its field too
    return block | {name: ""}, {"type": f"{name}_delta", name: block[name]}


def _refused(text: str) -> ChatRefused:
    return ChatRefused(400, "invalid_request_error", text)

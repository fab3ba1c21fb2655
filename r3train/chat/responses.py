"""OpenAI's newer dialect: bodies of /v1/responses read, answers and errors written.

No conversation is stored: each request shows the whole one, items of the session's own answers by their ids if it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from r3train.chat.base import ChatAnswer, ChatRefused, Message
from r3train.chat.openai import (
    ChatCall,
    count_of,
    error_json,
    Fields,
    ignored_fields,
    json_object,
    made_call,
    refuse,
    retries_of,
)
from r3train.user_code import quoted

_STATE = ((None, False), "nothing is stored: send the whole input")
_REFUSED: Fields = dict.fromkeys(
    "previous_response_id conversation prompt background".split(), _STATE
)
_STRICT: Fields = {"text.format": ((None, {"type": "text"}), "answers are free text")}
_IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (None,),
    "top_p": (None,),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "max_tool_calls": (None,),
    "reasoning": (None, {}),
}
_OTHERS = frozenset(
    "model input text instructions tools max_output_tokens stream stream_options metadata client_metadata user store"
    " service_tier safety_identifier prompt_cache_key prompt_cache_retention include truncation"
    " chat_template_kwargs enable_thinking".split()
)

# what clients expect in a response
_UNSET = dict.fromkeys("instructions temperature top_p".split())
_UNSET |= {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


# gives a session's answer by the number of its call
Answered = Callable[[str], ChatAnswer | None]


def read_request(
    body: bytes,
    retry_header: str | None = None,
    strict: bool = False,
    answered: Answered = lambda number: None,
) -> ChatCall:
    """Read a body of /v1/responses; raises ChatRefused (400) with one line for the client.

    retry_header: the value of x-stainless-retry-count, with which OpenAI's clients mark their retries.  strict: of
    --agent-strict, which refuses tools that OpenAI runs, too.
    """
    fields = json_object(body)
    refuse(fields, _REFUSED)
    if isinstance(text := fields.get("text"), dict):
        fields["text.format"] = text.get("format")
    tools, left_out = _tools(fields.get("tools"))
    if strict and left_out:
        raise _refused(f"a tool of type {quoted(left_out[0])}: expected functions only")
    choice = fields.get("tool_choice")
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    ignored = ignored_fields(fields, _IGNORED, _STRICT, _OTHERS | _REFUSED.keys())
    return made_call(
        fields,
        _messages(fields, answered),
        tools,
        max_tokens=count_of(fields, "max_output_tokens"),
        retry=retries_of(retry_header),
        strict=_STRICT if strict else None,
        ignored=[*ignored, "tools"] if left_out else ignored,
        choice="none" if choice == "none" else choice if is_named else None,
    )


def answer_json(answer: ChatAnswer, call: ChatCall) -> bytes:
    """An answer as the body that OpenAI's API gives."""
    return orjson.dumps(_response(call, list(_items(answer, call.number)), answer))


def begin_events(call: ChatCall) -> bytes:
    """The first events of a stream, as ``answer_events`` begins."""
    return _written(0, {"type": "response.created", "response": _response(call, [], None)})


def answer_events(answer: ChatAnswer, call: ChatCall) -> bytes:
    """A whole answer as server-sent events: its beginning, each item in one piece, its end."""
    events = enumerate(_events(answer, call), 1)
    return begin_events(call) + b"".join(_written(number, event) for number, event in events)


PING = b'event: keepalive\ndata: {"type": "keepalive", "sequence_number": 0}\n\n'


def error_event(refused: ChatRefused, call: ChatCall) -> bytes:
    """A refusal in a stream that has begun."""
    error = {"code": refused.code, "message": str(refused)}
    failed = _response(call, [], None) | {"status": "failed", "error": error}
    return _written(1, {"type": "response.failed", "response": failed})


def _messages(fields: dict[str, Any], answered: Answered) -> list[Message]:
    """The items of the input as messages: an answer's thoughts, text and calls are one, in any order."""
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise _refused(f"input {quoted(items)}: expected text or a list of items")
    made: list[Message] = []
    if fields.get("instructions"):
        made.append({"role": "system", "content": fields["instructions"]})
    thoughts: dict[str, Any] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "item_reference":
            item = _referred(item.get("id"), where, answered)
            kind = item["type"]
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            thoughts = {"reasoning_content": "\n".join(t for t in texts if isinstance(t, str))}
        elif kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if item.get("role") != "assistant":
                made.append(message)
            elif made and "tool_calls" in made[-1] and not made[-1]["content"]:
                made[-1]["content"] = message["content"]  # some clients show the calls first
            else:
                made.append(message | thoughts)
            thoughts = {}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": "", **thoughts})
                thoughts = {}
            calls = made[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function})
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise _refused(f"{where}: an output with call_id {quoted(item.get('call_id'))}")
            output = {"content": item.get("output"), "tool_call_id": item["call_id"]}
            made.append({"role": "tool", **output})
        else:
            raise _refused(
                f"{where} {quoted(item)}: expected a message, reasoning, a function_call or its output"
            )
    return made


def _referred(name: Any, where: str, answered: Answered) -> dict[str, Any]:
    """The item of an answer of this session by its id; raises ChatRefused (400)."""
    number = name.split("_")[1] if isinstance(name, str) and "_" in name else ""
    if (answer := answered(number)) is not None:
        for item in _items(answer, number):
            if item["id"] == name:
                return item
    raise _refused(
        f"{where}: item_reference {quoted(name)} is of no answer of this session: send the item whole"
    )


def _tools(value: Any) -> tuple[Any, list[Any]]:
    """Functions in the form of OpenAI's chats, and the types of tools that are none."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return value, []
    names = ("name", "description", "parameters", "strict")
    made = [
        {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
        for tool in value
        if tool.get("type") == "function"
    ]
    return made, [tool.get("type") for tool in value if tool.get("type") != "function"]


def _items(answer: ChatAnswer, number: str) -> Iterator[dict[str, Any]]:
    """The items of an answer; ``number`` of its call makes their ids."""
    message = answer.message
    done = {"status": "completed"}
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        yield {"id": f"rs_{number}", "type": "reasoning", "summary": summary, **done}
    if message.get("content") or not message.get("tool_calls"):
        content = [_text_part(message.get("content") or "")]
        yield {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "content": content,
            **done,
        }
    for index, call in enumerate(message.get("tool_calls") or ()):
        made = {"id": f"fc_{number}_{index}", "type": "function_call", "call_id": call["id"]}
        yield made | {name: call["function"][name] for name in ("name", "arguments")} | done


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    call: ChatCall, items: list[dict[str, Any]], answer: ChatAnswer | None
) -> dict[str, Any]:
    """The response that clients hold: with its answer, or while there is none."""
    status, details, usage = "in_progress", None, None
    if answer is not None:
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
    made = {"id": f"resp_{call.number}", "object": "response", "created_at": call.created}
    made |= {"status": status, "incomplete_details": details, "model": call.model, "output": items}
    return made | {"usage": usage, "error": None, **_UNSET}


def _events(answer: ChatAnswer, call: ChatCall) -> Iterator[dict[str, Any]]:
    items = list(_items(answer, call.number))
    for index, item in enumerate(items):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"message": {"content": []}, "function_call": {"arguments": ""}}
        begun = item | empty.get(item["type"], {}) | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if item["type"] == "message":
            at |= {"content_index": 0}
            (part,) = item["content"]
            at |= {"logprobs": []}
            yield {"type": "response.content_part.added", **at, "part": _text_part("")}
            yield {"type": "response.output_text.delta", **at, "delta": part["text"]}
            yield {"type": "response.output_text.done", **at, "text": part["text"]}
            yield {"type": "response.content_part.done", **at, "part": part}
        elif item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", **at, "delta": arguments}
            yield {"type": f"{kind}.done", **at, "arguments": arguments, "name": item["name"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    response = _response(call, items, answer)
    yield {"type": f"response.{response['status']}", "response": response}


def _written(number: int, event: dict[str, Any]) -> bytes:
    data = orjson.dumps(event | {"sequence_number": number})
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data)


def _refused(text: str) -> ChatRefused:
    return ChatRefused(400, "invalid_request_error", text)

"""OpenAI's responses: items become messages and come back as what was answered; every body is read or refused."""

import json

import orjson
import pytest
from hypothesis import given, strategies as st
from tests.unit.chat.test_openai import _CALL, _JSON, _MESSAGES, _paths, spoiled

from r3train.chat.base import ChatAnswer, ChatRefused
from r3train.chat.messages import message_key
from r3train.chat.openai import ChatCall
from r3train.chat.responses import (
    answer_events,
    answer_json,
    begin_events,
    error_event,
    read_request,
)

_USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def _read(strict=False, **fields):
    return read_request(orjson.dumps({"model": "m", "input": [_USER], **fields}), None, strict)


_HISTORY = [
    {"role": "developer", "content": "be brief"},
    _USER,
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a lawn"},
    {
        "type": "function_call_output",
        "call_id": "d",
        "output": [{"type": "input_text", "text": "b"}],
    },
]


@pytest.mark.parametrize("name", ["stream", "stream_options", "metadata", "client_metadata"])
def test_a_later_try_that_wants_another_form_is_the_same_request(name):
    form = {name: True if name == "stream" else {"try": "2"}}
    assert _read(**form).request.digest == _read().request.digest != _read(user="u").request.digest


def test_items_become_messages():
    call = _read(
        instructions="be",
        input=_HISTORY,
        tools=[_TOOL, {"type": "web_search"}],
        max_output_tokens=9,
        reasoning={"effort": "high"},
        text={"verbosity": "low", "format": {"type": "json_object"}},
        tool_choice={"type": "function", "name": "f"},
        client_metadata={"a": "b"},
        stream=True,
    )
    request = call.request
    calls = [_CALL, _CALL | {"id": "d"}]
    assert request.messages == [
        {"role": "system", "content": "be"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "a lawn", "tool_call_id": "c"},
        {"role": "tool", "content": "b", "tool_call_id": "d"},
    ]
    function = {"name": "f", "parameters": {"type": "object"}, "strict": False}
    assert request.tools == request.readable == [{"type": "function", "function": function}]
    assert (call.stream, request.max_tokens) == (True, 9)
    assert request.ignored == ("reasoning", "text.format", "tools")


def test_calls_before_their_text_are_the_same_answer():
    usual, calls_first = _HISTORY[3:], [*_HISTORY[4:6], _HISTORY[3], *_HISTORY[6:]]
    read = [_read(input=[_USER, *items]).request.messages for items in (usual, calls_first)]
    assert read[0] == read[1] and len(read[0]) == 4


def test_text_is_a_users_message():
    assert _read(input="hi").request.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"input": 5}, "input 5"),
        ({"input": [5]}, r"input\[0\] 5"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].*item_reference"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id None"),
        ({"previous_response_id": "resp_1"}, "previous_response_id .*send the whole input"),
        ({"background": True}, "background True"),
        ({"tools": [{"type": "web_search"}]}, "'web_search'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format .*free text"),
        ({"max_output_tokens": 0}, "max_output_tokens 0"),
        ({"input": [_USER, _HISTORY[3]]}, "the last one"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, what):
    with pytest.raises(ChatRefused, match=what) as refused:
        _read(strict=True, **fields)
    assert refused.value.status == 400


_WHOLE = {"model": "m", "instructions": "be", "input": _HISTORY, "tools": [_TOOL]}
_WHOLE |= dict.fromkeys("text tool_choice reasoning stream max_output_tokens background".split())


@given(st.sampled_from(list(_paths(_WHOLE))), _JSON, st.booleans())
def test_any_value_in_any_place_is_read_or_refused_in_one_line(path, value, leave_out):
    whole = spoiled(_WHOLE, path, value, leave_out)
    try:
        assert isinstance(read_request(orjson.dumps(whole)), ChatCall)
    except ChatRefused as refused:
        assert refused.status == 400 and "\n" not in str(refused)


def _parts(events):
    return [json.loads(event.split("\ndata: ")[1]) for event in events.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("message", _MESSAGES.values(), ids=_MESSAGES)
def test_a_stream_says_what_json_says_and_both_come_back_as_the_same_message(message, reason):
    answer, call = ChatAnswer(message, reason, 7, 5), _read(stream=True)
    body, events = orjson.loads(answer_json(answer, call)), answer_events(answer, call)
    assert events.startswith(begin_events(call))
    parts = _parts(events)
    assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    assert parts[0]["type"] == "response.created" and parts[0]["response"]["output"] == []
    assert parts[-1]["type"] == f"response.{body['status']}"
    assert body["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    assert body["id"] == parts[0]["response"]["id"] == parts[-1]["response"]["id"]
    done = [part["item"] for part in parts if part["type"] == "response.output_item.done"]
    for response in (body, parts[-1]["response"], {"output": done}):
        (again,) = _read(input=[*response["output"], _USER]).request.messages[:-1]
        assert message_key(again) == message_key(message)
        assert again.get("reasoning_content") == message.get("reasoning_content")
    assert body["usage"]["total_tokens"] == 12


def test_an_item_of_the_sessions_own_answers_may_be_named_by_its_id():
    answer = ChatAnswer({"role": "assistant", "content": "hm", "tool_calls": [_CALL]}, "stop", 7, 5)
    asked = _read()
    items = json.loads(answer_json(answer, asked))["output"]
    names = [{"type": "item_reference", "id": item["id"]} for item in items]
    body = lambda items: orjson.dumps({"input": [*items, _USER]})
    answered = {asked.number: answer}.get
    named = read_request(body(names), answered=answered).request.messages
    assert named == read_request(body(items)).request.messages and len(named) == 2
    for name in (names[0]["id"] + "0", "msg", "", None, 5):
        with pytest.raises(ChatRefused, match=r"input\[0\].*item_reference"):
            read_request(body([{"type": "item_reference", "id": name}]), answered=answered)


def test_a_refusal_ends_a_stream_that_has_begun():
    call = _read(stream=True)
    (part,) = _parts(error_event(ChatRefused(403, "session_over", "x"), call))
    error = {"code": "session_over", "message": "x"}
    assert (part["type"], part["response"]["error"]) == ("response.failed", error)

"""Anthropic's dialect: blocks become messages and come back as what was answered; every body is read or refused."""

import json

import orjson
import pytest
from hypothesis import given, strategies as st
from tests.unit.chat.test_openai import _JSON, _paths, spoiled

from r3train.chat.anthropic import answer_events, answer_json, error_json, read_request
from r3train.chat.base import ChatAnswer, ChatRefused
from r3train.chat.messages import message_key
from r3train.chat.openai import ChatCall

_USER = {"role": "user", "content": "hi"}


def _read(strict=False, **fields):
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": [_USER], **fields})
    return read_request(body, None, strict)


def _block(kind, **fields):
    return {"type": kind, **fields}


_HISTORY = [
    _USER,
    {
        "role": "assistant",
        "content": [
            _block("thinking", thinking="hm", signature="x"),
            _block("text", text="I look."),
            _block("tool_use", id="t1", name="look", input={"at": 1.0}),
        ],
    },
    {
        "role": "user",
        "content": [
            _block("tool_result", tool_use_id="t1", content=[_block("text", text="a lawn")]),
            _block("text", text="and now?", cache_control={"type": "ephemeral"}),
        ],
    },
]
_TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


def test_blocks_become_messages():
    request = _read(
        system=[_block("text", text="be"), _block("text", text="brief")],
        messages=_HISTORY,
        tools=[_TOOL],
        stop_sequences=["x"],
        temperature=1,
        thinking={"type": "enabled", "budget_tokens": 2000},
        tool_choice={"type": "auto"},
    ).request
    assert request.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": 1.0}'},
                }
            ],
        },
        {"role": "tool", "content": "a lawn", "tool_call_id": "t1"},
        {"role": "user", "content": "and now?"},
    ]
    function = {"name": "look", "parameters": {"type": "object"}, "description": "Look."}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.stop, request.max_tokens) == (("x",), 9)
    assert request.ignored == ("temperature", "thinking")


def test_a_deferred_tool_is_shown_where_a_result_refers_to_it_and_its_calls_are_read():
    search = {"name": "search", "input_schema": {"type": "object"}}
    found = {"name": "add", "description": "adds", "input_schema": {}, "defer_loading": True}
    use = {"type": "tool_use", "id": "c", "name": "search", "input": {}}
    refers = [{"type": "tool_reference", "tool_name": name} for name in ("add", "gone")]
    result = {"type": "tool_result", "tool_use_id": "c", "content": refers}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    asked = {"model": "m", "max_tokens": 9, "messages": messages}
    request = read_request(orjson.dumps(asked | {"tools": [found, search]})).request
    names = lambda tools: [tool["function"]["name"] for tool in tools]
    assert names(request.tools) == ["search"] and names(request.readable) == ["search", "add"]
    schema, gone = request.messages[1]["content"].split("\n")
    function = {"name": "add", "parameters": {}, "description": "adds"}
    assert orjson.loads(schema) == {"type": "function", "function": function}
    assert orjson.loads(gone) == "gone"
    without = read_request(orjson.dumps(asked | {"tools": [search]})).request
    assert names(without.tools) == ["search"] and without.readable is None
    for choice, readable in (
        ({"type": "none"}, []),
        ({"type": "tool", "name": "search"}, ["search"]),
    ):
        chosen = asked | {"tools": [found, search], "tool_choice": choice}
        assert names(read_request(orjson.dumps(chosen)).request.readable) == readable
    refers[0]["tool_name"] = 5
    with pytest.raises(ChatRefused, match="tool_reference"):
        read_request(orjson.dumps(asked | {"tools": [found]}))


def test_text_before_a_tools_result_is_said_once_and_before_it():
    result = _block("tool_result", tool_use_id="t1", content="a lawn")
    blocks = [_block("text", text="it says"), result, _block("text", text="and now?")]
    for content in (blocks, blocks[:2]):
        messages = _read(messages=[*_HISTORY[:2], {"role": "user", "content": content}])
        said = [(m["role"], m["content"]) for m in messages.request.messages[2:]]
        expected = [("user", "it says"), ("tool", "a lawn"), ("user", "and now?")]
        assert said == expected[: len(content)]


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"messages": "hi"}, "messages 'hi'"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            r"messages\[0\].*role user, assistant or system",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content 5"),
        ({"messages": [{"role": "user", "content": [_block("image")]}]}, "'image'.*only text"),
        ({"messages": [{"role": "user", "content": [_block("tool_result")]}]}, "tool_use_id None"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [_block("tool_use", input="x")]},
                    _USER,
                ]
            },
            "input 'x'",
        ),
        ({"messages": [_USER, {"role": "assistant", "content": "a"}]}, "the last one"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\[0\].*client's own",
        ),
        ({"tools": [{"input_schema": {}}]}, r"tools\[0\].function"),
        ({"output_config": {"format": {}}}, "output_config.format .*free text"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"system": [_block("image")]}, "'image'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, what):
    with pytest.raises(ChatRefused, match=what) as refused:
        _read(strict=True, **fields)
    assert refused.value.status == 400


def test_what_claude_code_sends_is_read():
    """A system message among the others, a picture as a tool's result, and settings of its own servers."""
    picture = _block("tool_result", tool_use_id="t1", content=[_block("image", source={})])
    messages = [_USER, {"role": "system", "content": [_block("text", text="be brief")]}]
    messages += [_HISTORY[1], {"role": "user", "content": [picture]}]
    fields = {"output_config": {"effort": "high"}, "context_management": {"edits": []}}
    for choice, readable in (({"type": "none"}, []), ({"type": "tool", "name": "look"}, 1)):
        call = _read(messages=messages, tools=[_TOOL], tool_choice=choice, **fields)
        request = call.request
        assert len(request.readable) == (readable or 0)
        assert set(request.ignored) == {"pictures"}
    contents = [(m["role"], m["content"]) for m in request.messages]
    assert contents[1] == ("system", "be brief")
    assert contents[3] == ("tool", "[a picture, which this model cannot see]")


@pytest.mark.parametrize("place", [0, 1])
def test_a_billing_header_with_another_nonce_is_the_same_request(place):
    """Claude Code's: the rest of the system's text stays, and the header is counted."""
    texts = [_block("text", text="be"), _block("text", text="brief")]

    def asked(nonce):
        header = _block("text", text=f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};")
        return _read(system=[*texts[:place], header, *texts[place:]]).request

    one, two = asked("a"), asked("b")
    assert one == two and one.messages[0] == {"role": "system", "content": "be\nbrief"}
    assert one.ignored == ("billing_header",)
    alone = _read(system=[_block("text", text="x-anthropic-billing-header: cch=1")]).request
    assert alone.messages == [_USER]
    spoken = _read(system=[_block("text", text="Never say x-anthropic-billing-header: it")]).request
    assert "x-anthropic" in spoken.messages[0]["content"] and spoken.ignored == ()


def test_the_stop_text_that_ended_an_answer_is_named():
    answer = ChatAnswer({"role": "assistant", "content": "a"}, "stop", 7, 5, stop_text="END")
    for body in (
        orjson.loads(answer_json(answer, _read())),
        _merged(answer_events(answer, _read())),
    ):
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


_WHOLE = {
    "model": "m",
    "max_tokens": 9,
    "system": [_block("text", text="a")],
    "messages": _HISTORY,
    "tools": [_TOOL],
    "stop_sequences": ["x"],
    "stream": True,
    "thinking": {},
}


@given(st.sampled_from(list(_paths(_WHOLE))), _JSON, st.booleans())
def test_any_value_in_any_place_is_read_or_refused_in_one_line(path, value, leave_out):
    whole = spoiled(_WHOLE, path, value, leave_out)
    try:
        assert isinstance(read_request(orjson.dumps(whole)), ChatCall)
    except ChatRefused as refused:
        assert refused.status == 400 and "\n" not in str(refused)


def _merged(events):
    """The message as Anthropic's client puts a stream together."""
    message = {}
    for event in events.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        part = json.loads(data.removeprefix("data: "))
        assert name == f"event: {part['type']}"
        match part["type"]:
            case "message_start":
                message = part["message"]
            case "content_block_start":
                block = part["content_block"]
                filled = "input" if block["type"] == "tool_use" else block["type"]
                assert not block[filled], "it is filled by what follows"
                message["content"].append(block)
            case "content_block_delta":
                block, delta = message["content"][part["index"]], part["delta"]
                if delta["type"] == "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    block[block["type"]] += delta[block["type"]]
            case "message_delta":
                message |= part["delta"]
                message["usage"] |= part["usage"]
    return message


_CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": [1, "é"]}'},
}
_ANSWERS = {
    "text": ({"role": "assistant", "content": "a\n\nb\u2028"}, "length"),
    "nothing": ({"role": "assistant", "content": ""}, "stop"),
    "calls": (
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [_CALL, _CALL | {"id": "t2"}],
        },
        "tool_calls",
    ),
}


@pytest.mark.parametrize("message, reason", _ANSWERS.values(), ids=_ANSWERS)
def test_a_stream_says_what_json_says_and_both_come_back_as_the_same_message(message, reason):
    answer = ChatAnswer(message, reason, 7, 5)
    body = orjson.loads(answer_json(answer, _read()))
    streamed = _merged(answer_events(answer, _read(stream=True)))
    assert streamed | {"id": ""} == body | {"id": ""}
    assert body["usage"] == {"input_tokens": 7, "output_tokens": 5}
    expected = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
    assert body["stop_reason"] == expected[reason]
    assert all(
        block.get("text") != "" for block in body["content"]
    ), "its clients refuse to send that"
    returned = {"role": "assistant", "content": body["content"]}
    again = _read(messages=[_USER, returned, _USER]).request.messages[1]
    assert message_key(again) == message_key(message)


@pytest.mark.parametrize(
    "status, code, kind, begins",
    [
        (400, "context_length_exceeded", "invalid_request_error", "prompt is too long: x"),
        (400, "invalid_request_error", "invalid_request_error", "x"),
        (401, "invalid_api_key", "authentication_error", "x"),
        (403, "session_over", "permission_error", "x"),
        (500, "x", "api_error", "x"),
    ],
)
def test_an_error_has_anthropics_form(status, code, kind, begins):
    error = orjson.loads(error_json(ChatRefused(status, code, "x")))
    assert error == {"type": "error", "error": {"type": kind, "message": begins}}

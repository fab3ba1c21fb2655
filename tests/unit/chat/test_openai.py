"""OpenAI's dialect: every body is read or refused in one line, and a stream says what JSON says."""

import json

import orjson
import pytest
from hypothesis import given, strategies as st

from r3train.chat.base import ChatAnswer, ChatRefused
from r3train.chat.openai import ChatCall, answer_events, answer_json, error_json, read_request

_USER = {"role": "user", "content": "hi"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _read(retry=None, strict=False, **fields):
    return read_request(orjson.dumps({"model": "m", "messages": [_USER], **fields}), retry, strict)


def test_a_request_is_read():
    call = _read("2", tools=[_TOOL], max_tokens=9, stop="x", stream=True)
    request = call.request
    assert (call.model, call.stream, call.include_usage) == ("m", True, False)
    assert (request.messages, request.tools, request.stop) == ([_USER], [_TOOL], ("x",))
    assert (request.max_tokens, request.retry, request.ignored) == (9, 2, ())


def test_the_smaller_bound_counts_of_two():
    assert _read(max_tokens=9, max_completion_tokens=5).request.max_tokens == 5


@pytest.mark.parametrize(
    "header, retry", [(None, 0), ("0", 0), ("1", 1), ("-1", 0), ("1x", 0), ("1" * 5, 0), ("", 0)]
)
def test_what_is_no_number_marks_no_retry(header, retry):
    assert _read(header).request.retry == retry


def test_only_the_same_body_has_the_same_digest_in_whatever_form_its_answer_is_wanted():
    assert _read().request.digest == _read().request.digest
    again = _read(stream=True, stream_options={"include_usage": True}, metadata={"try": "2"})
    assert again.request.digest == _read().request.digest
    assert _read().request.digest != _read(user="another").request.digest


@pytest.mark.parametrize(
    "fields, ignored",
    [
        ({"temperature": 0.0}, ("temperature",)),
        ({"top_p": 1, "seed": 0}, ("top_p", "seed")),
        ({"tool_choice": "required"}, ("tool_choice",)),
        ({"tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False}, ()),
        ({"parallel_tool_calls": False, "logprobs": True}, ("parallel_tool_calls", "logprobs")),
        ({"temperature": None, "n": 1, "presence_penalty": 0.0, "logit_bias": {}}, ()),
        ({"response_format": {"type": "text"}, "modalities": ["text"]}, ()),
        ({"user": "u", "store": True, "metadata": {}, "stream_options": {}}, ()),
        ({"guided_json": {}, "min_tokens": 3}, ("guided_json", "min_tokens")),
        ({"a b": 1, "x" * 41: 1}, ("other", "other")),
        ({f"f{n}": n for n in range(99)}, (*(f"f{n}" for n in range(8)), "other")),
        ({"n": 2, "presence_penalty": 0.1}, ("n", "presence_penalty")),
        ({"response_format": {"type": "json_object"}}, ("response_format",)),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ("pictures",)),
        ({"tool_choice": "none", "tools": [_TOOL]}, ()),
    ],
)
def test_what_has_no_effect_is_named(fields, ignored):
    assert _read(**fields).request.ignored == ignored


def test_the_tools_that_may_be_called_are_those_of_the_choice():
    tools = [_TOOL, {"type": "function", "function": {"name": "g"}}]
    named = {"type": "function", "function": {"name": "g"}}
    for choice, readable in (("none", []), ("auto", None), (named, tools[1:])):
        request = _read(tools=tools, tool_choice=choice).request
        assert (request.tools, request.readable, request.ignored) == (tools, readable, ())
    with pytest.raises(ChatRefused, match="tool_choice .* no tool has this name"):
        _read(tools=[_TOOL], tool_choice=named)


def test_variables_of_the_template_reach_the_session():
    values = {"a": 1, "enable_thinking": False}
    given = _read(chat_template_kwargs={"a": 1}, enable_thinking=False).request
    assert (given.template_values, given.ignored) == (values, ())


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"n": 2}, "n 2 is not supported: one answer"),
        ({"n": True}, "n True"),
        ({"response_format": {"type": "json_object"}}, "response_format .*json_object"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty 0.1 .*sampling is the run's"),
        ({"frequency_penalty": -1}, "frequency_penalty -1"),
        ({"modalities": ["text", "audio"]}, "only text"),
        ({"functions": [{}]}, "give tools"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_completion_tokens": True}, "max_completion_tokens True"),
        ({"max_tokens": "9"}, "max_tokens '9'"),
        ({"stop": ""}, "stop ''"),
        ({"stop": ["a", 1]}, r"stop \['a', 1\]"),
        ({"stop": ["a"] * 17}, "17 texts, expected at most 16"),
        ({"stream": "yes"}, "stream 'yes'"),
        ({"stream_options": {"include_usage": 1}}, "include_usage 1"),
        ({"stream_options": []}, r"stream_options \[\]"),
        ({"model": 5}, "model 5"),
        ({"messages": [_USER, {"role": "assistant", "content": "a"}]}, "the last one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, what):
    with pytest.raises(ChatRefused, match=what) as refused:
        _read(strict=True, **fields)
    assert (refused.value.status, refused.value.code) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"messages": "\\ud800"}', b"NaN", b"null"]
    + [b'{"tools": ' + b"[" * 101 + b"]" * 101 + b"}"],
)
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ChatRefused, match="the body is"):
        read_request(body)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_WHOLE = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}], "name": "s"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ],
    "tools": [_TOOL],
    **dict.fromkeys(
        "n temperature response_format logit_bias presence_penalty functions audio stop max_tokens"
        " max_completion_tokens stream stream_options tool_choice modalities logprobs".split()
    ),
}


def _paths(value, path=()):
    yield path
    for key in (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    ):
        yield from _paths(value[key], (*path, key))


def spoiled(whole, path, value, leave_out):
    """A copy of a body with another value at a path, or nothing there."""
    if not path:
        return value
    whole = place = json.loads(json.dumps(whole))
    for key in path[:-1]:
        place = place[key]
    if leave_out:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return whole


@given(st.sampled_from(list(_paths(_WHOLE))), _JSON, st.booleans())
def test_any_value_in_any_place_is_read_or_refused_in_one_line(path, value, leave_out):
    whole = spoiled(_WHOLE, path, value, leave_out)
    try:
        assert isinstance(read_request(orjson.dumps(whole)), ChatCall)
    except ChatRefused as refused:
        assert refused.status == 400 and "\n" not in str(refused)
        assert orjson.loads(error_json(refused))["error"]["message"] == str(refused)


def _merged(events):
    """The message and its end as clients put a stream together, and its usage."""
    lines = events.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    message, finish, usage = {}, None, None
    for line in lines[:-2]:
        part = json.loads(line.removeprefix("data: "))
        assert part["object"] == "chat.completion.chunk"
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            calls = message.get("tool_calls", []) + choice["delta"].get("tool_calls", [])
            assert (
                len(choice["delta"].get("tool_calls", [])) < 2
            ), "some clients read the first only"
            message |= choice["delta"] | ({"tool_calls": calls} if calls else {})
            finish = choice["finish_reason"] or finish
    for index, call in enumerate(message.get("tool_calls", ())):
        assert call.pop("index") == index
    return message, finish, usage


_MESSAGES = {
    "text": {"role": "assistant", "content": "a\n\ndata: é\u2028"},
    "calls": {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [_CALL, _CALL | {"id": "d"}],
    },
}


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("message", _MESSAGES.values(), ids=_MESSAGES)
def test_a_stream_says_what_json_says(message, include_usage):
    answer = ChatAnswer(message, "tool_calls", 7, 5)
    call = _read(stream=True, stream_options={"include_usage": include_usage})
    body = orjson.loads(answer_json(answer, call))
    (choice,) = body["choices"]
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert (choice["message"], choice["finish_reason"], body["usage"]) == (
        message,
        "tool_calls",
        usage,
    )
    streamed = _merged(answer_events(answer, call))
    assert streamed == (message, "tool_calls", usage if include_usage else None)


def test_an_error_has_openais_form():
    refused = ChatRefused(400, "context_length_exceeded", "too long")
    assert orjson.loads(error_json(refused)) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    }

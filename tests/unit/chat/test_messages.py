"""Two messages are one where a harness may have written them anew, and no other two are."""

import json

import pytest
from hypothesis import given, strategies as st

from r3train.chat.base import ChatRefused
from r3train.chat.messages import checked_messages, checked_tools, message_key, plain, text_of


def _call(arguments, name="add", call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _answer(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


_ONE = {
    "nothing is None": ({"role": "assistant"}, {"role": "assistant", "content": None}),
    "None is empty": (_answer(), {"role": "assistant", "content": ""}),
    "no parts are nothing": ({"role": "user", "content": []}, {"role": "user"}),
    "parts are joined": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "a\nb"},
    ),
    "arguments are serialised anew": (
        _answer(_call('{"a": 0, "b": [1.0, "é"]}')),
        _answer(_call('{"b":[1,"\\u00e9"],"a":0}')),
    ),
    "arguments are a table": (_answer(_call('{"a": 1.5}')), _answer(_call({"a": 1.5}))),
    "reasoning is dropped": (_answer(reasoning_content="hm"), _answer()),
    "fields of providers": (_answer(provider_specific_fields={"x": 1}, refusal=None), _answer()),
    "a developer is the system": (
        {"role": "developer", "content": "be"},
        {"role": "system", "content": "be"},
    ),
}


@pytest.mark.parametrize("first, second", _ONE.values(), ids=_ONE)
def test_messages_that_a_harness_rewrote_are_one(first, second):
    assert message_key(first) == message_key(second)


_TWO = {
    "role": ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
    "text": ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
    "text or call": (_answer(_call("{}")), _answer(content="{}")),
    "call id": (_answer(_call("{}")), _answer(_call("{}", call_id="c2"))),
    "name": (_answer(_call("{}")), _answer(_call("{}", name="sub"))),
    "arguments": (_answer(_call('{"a": 1}')), _answer(_call('{"a": 2}'))),
    "true or one": (_answer(_call('{"a": 1}')), _answer(_call('{"a": true}'))),
    "large numbers": (_answer(_call(f'{{"a": {2**70}}}')), _answer(_call(f'{{"a": {2**70 + 1}}}'))),
    "text or its JSON": (_answer(_call("abc")), _answer(_call('"abc"'))),
    "order of calls": (
        _answer(_call("{}"), _call("{}", call_id="c2")),
        _answer(_call("{}", call_id="c2"), _call("{}")),
    ),
    "answered call": (
        {"role": "tool", "content": "a", "tool_call_id": "c1"},
        {"role": "tool", "content": "a", "tool_call_id": "c2"},
    ),
}


@pytest.mark.parametrize("first, second", _TWO.values(), ids=_TWO)
def test_messages_that_differ_are_two(first, second):
    assert message_key(first) != message_key(second)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_arguments_are_compared_by_value_whatever_wrote_them(arguments):
    compact = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    turned = json.dumps(dict(reversed(arguments.items())), indent=2)
    assert message_key(_answer(_call(compact))) == message_key(_answer(_call(turned)))
    assert message_key(_answer(_call(compact))) == message_key(_answer(_call(arguments)))


@given(st.text())
def test_any_text_may_stand_for_arguments(text):
    assert len(message_key(_answer(_call(text)))) == 16
    made = plain(_answer(_call(text)), "text")["tool_calls"][0]["function"]["arguments"]
    assert made == ("{}" if text.strip() in ("", "null") else text)


def test_arguments_nested_without_end_are_text():
    deep = '{"a":' * 100_000
    assert message_key(_answer(_call(deep))) != message_key(_answer(_call(deep + "1")))
    assert plain(_answer(_call(deep)), "table")["tool_calls"][0]["function"]["arguments"] == deep


@pytest.mark.parametrize(
    "content, what",
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'"),
        ([{"type": "input_audio", "input_audio": {}}], "'input_audio'"),
        ([{"type": "text"}], "text None"),
        (["a"], "'a'"),
        (5, "content 5"),
    ],
)
def test_content_that_is_no_text_is_refused(content, what):
    with pytest.raises(ChatRefused, match=what) as refused:
        text_of(content)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "form, given_, expected",
    [
        ("table", '{"a": 1.0}', {"a": 1.0}),
        ("table", {"a": 1}, {"a": 1}),
        ("table", "[1]", "[1]"),
        ("table", '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("table", None, {}),
        ("table", " \n", {}),
        ("text", "", "{}"),
        ("text", "null", "{}"),
        ("text", None, "{}"),
        ("text", {"a": "é"}, '{"a": "é"}'),
        ("text", '{"a":1}', '{"a":1}'),
    ],
)
def test_a_template_gets_arguments_in_its_form(form, given_, expected):
    made = plain(_answer(_call(given_), reasoning_content="hm", refusal=None), form)
    assert made == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [_call(expected)],
    }


def test_checked_messages_keep_what_counts():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]},
        _answer(_call({"a": 1}), refusal=None, annotations=[]),
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert checked_messages(messages) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [_call('{"a": 1}')]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


_USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "messages, what",
    [
        (None, "messages None"),
        ([], r"messages \[\]"),
        (["hi"], r"messages\[0\]: 'hi'"),
        ([_USER, {"role": "function", "content": ""}], r"messages\[1\]: role 'function'"),
        ([{"role": ["user"]}], r"role \['user'\]"),
        ([_USER, {"role": "assistant", "content": "a"}], "the last one is the assistant's"),
        ([{**_USER, "name": 1}], "name 1"),
        ([{**_USER, "tool_calls": [_call("{}")]}], "in the assistant's only"),
        ([{**_USER, "audio": {"id": "x"}}], "audio is not supported"),
        ([_answer(function_call={}), _USER], "function_call is not supported"),
        ([_answer() | {"tool_calls": {}}, _USER], "tool_calls {}"),
        ([_answer({"function": {"name": ""}}), _USER], "and its name"),
        ([_answer(_call("{}", call_id=1)), _USER], "a call's id 1"),
        ([_answer(_call([1])), _USER], r"arguments \[1\]"),
    ],
)
def test_messages_that_are_none_are_refused_by_name(messages, what):
    with pytest.raises(ChatRefused, match=what) as refused:
        checked_messages(messages)
    assert (refused.value.status, "\n" in str(refused.value)) == (400, False)


@pytest.mark.parametrize(
    "tools, what",
    [
        ({}, "tools {}"),
        ([{"type": "web_search"}], r"tools\[0\]"),
        ([{"type": "function", "function": {"name": 1}}], r"tools\[0\].function"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
            r"tools\[0\].function.parameters 'x'",
        ),
    ],
)
def test_tools_that_are_none_are_refused_by_name(tools, what):
    with pytest.raises(ChatRefused, match=what):
        checked_tools(tools)


def test_tools_are_what_was_given():
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert checked_tools(tools) is tools and checked_tools(None) == []

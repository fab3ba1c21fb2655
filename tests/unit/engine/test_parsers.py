"""SGLang's parsers as a library: what well-formed text holds, and that no text makes them raise."""

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from r3train.chat.base import Parsed
from r3train.engine.parsers import known_calls, make_parse
from r3train.user_code import UserCodeFailed

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
_THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
# what SGLang's rules judge Qwen3 by
_QWEN3 = (
    "{% if tools %}<tools></tools>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '<|im_end|>{% endfor %}{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}<tool_call>{"name"'
)


class _Tokenizer:
    """A tokenizer as far as the parsers ask one: its chat template, rendered, and its vocabulary."""

    def __init__(self, chat_template="plain", opening=""):
        self.chat_template, self.opening = chat_template, opening

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, **kwargs):
        return f"user .{kwargs.get('opening', self.opening)}"

    def get_vocab(self):
        return {"<tool_call>": 1, "<|im_start|>": 2}

    def encode(self, text, **_):
        return [1]

    def convert_tokens_to_ids(self, token):
        return 1


def _parse(calls="none", reasoning="none", tokenizer=None, **kwargs):
    return make_parse(calls, reasoning, tokenizer or _Tokenizer(), kwargs)


def _read(parsed: Parsed):
    calls = [(call["name"], json.loads(call["arguments"])) for call in parsed.calls]
    return parsed.reasoning, parsed.content.strip(), calls


@pytest.mark.parametrize(
    "calls, reasoning, text, expected",
    [
        ("none", "none", f"<think>a</think>{_CALL}", (None, f"<think>a</think>{_CALL}", [])),
        ("qwen25", "none", f"text {_CALL}", (None, "text", [("add", {"a": 1})])),
        ("qwen25", "qwen3", f"<think>hm</think>\n{_CALL}", ("hm", "", [("add", {"a": 1})])),
        ("qwen25", "qwen3", f"<think>{_CALL}</think>x", (_CALL, "x", [])),
        (
            "glm45",
            "none",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            (None, "", [("add", {"a": 1})]),
        ),
        # SGLang's endpoint shows no call that it cannot read to its end, nor its text
        ("qwen25", "none", "<tool_call>\nno call\n</tool_call>", (None, "", [])),
        ("qwen25", "none", '<tool_call>\n{"name": "add", "arg', (None, "", [])),
        ("glm45", "none", "x<tool_call>add\n<arg_key>a", (None, "x", [])),
        # of which its parsers read some nevertheless
        (
            "qwen3_coder",
            "none",
            "x<tool_call>\n<function=add>\n<parameter=a>\n1",
            (None, "x", [("add", {"a": 1})]),
        ),
        ("qwen25", "none", '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', None),
        ("qwen25", "none", "<tool_call>", None),
        (
            "qwen25",
            "none",
            '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
            None,
        ),
    ],
)
def test_a_text_is_read(calls, reasoning, text, expected):
    assert _read(_parse(calls, reasoning)(text, _TOOLS)) == (expected or (None, text, []))


@pytest.mark.parametrize(
    "opening, text, expected",
    [
        ("<think>\n", "hm</think>x", ("hm", "x", [])),
        ("<think>\n", "hm", ("hm", "", [])),
        ("<think>\n\n</think>\n\n", "x", (None, "x", [])),
        ("", "x", (None, "x", [])),
        ("", "<think>hm", ("hm", "", [])),
    ],
)
def test_a_prompt_that_ends_within_a_thought_begins_the_answer_there(opening, text, expected):
    assert _read(_parse("none", "qwen3", opening=opening)(text, _TOOLS)) == expected


_KIMI_K2 = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
_KIMI_K3 = (
    '<|open|>tools<|sep|><|open|>call tool="add" index="7"<|sep|><|open|>argument key="a" type="number"'
    "<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)


@pytest.mark.parametrize(
    "parser, text", [("kimi_k2", _KIMI_K2), ("kimi_k3", _KIMI_K3), ("qwen25", _CALL)]
)
def test_the_ids_of_calls_are_those_of_sglangs_endpoint(parser, text):
    """Its own function gives the second call behind a history of three its id."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.function_call.core_types import ToolCallItem

    second = ToolCallItem(tool_index=1, name="add", parameters="{}")
    server = SimpleNamespace(tool_call_parser=parser)
    theirs = OpenAIServingChat._process_tool_call_id(server, second, 3)
    parsed = _parse(parser, "none")(text, _TOOLS)
    assert _read(parsed)[2] == [("add", {"a": 1})]
    if parsed.ids is None:
        assert re.fullmatch("call_[0-9a-f]{24}", theirs)
    else:
        assert parsed.ids.format(name="add", index=4) == theirs


def test_auto_judges_by_the_chat_template():
    parse = _parse("auto", "auto", _Tokenizer(_QWEN3))
    assert _read(parse(f"<think>hm</think>{_CALL}", _TOOLS)) == ("hm", "", [("add", {"a": 1})])


def users(text, tools):
    return Parsed(text.upper(), None, ({"name": "add", "arguments": "{}"},) * len(tools))


def wrong(text, tools):
    return text


def no_arguments(text, tools):
    return Parsed(text, None, ({"name": "add", "arguments": "[1]"},))


def wrong_ids(text, tools):
    return Parsed(text, ids="call-{number}")


def raises(text, tools):
    raise KeyError("a")


def test_a_function_of_the_user_reads_what_follows_the_reasoning():
    parsed = _parse(f"{__name__}:users", "qwen3")("<think>hm</think>x", _TOOLS)
    assert _read(parsed) == ("hm", "X", [("add", {})])


@pytest.mark.parametrize(
    "name, what",
    [("wrong", "returned 'x', expected"), ("raises", "KeyError"), ("wrong_ids", "number")],
)
def test_a_function_of_the_user_that_fails_is_named(name, what):
    with pytest.raises(
        UserCodeFailed, match=f"--agent-tool-call-parser .*:{name}, reading 'x': .*{what}"
    ):
        _parse(f"{__name__}:{name}")("x", _TOOLS)


@pytest.mark.parametrize(
    "calls, reasoning, what",
    [
        (
            "qwen",
            "qwen4",
            "--agent-reasoning-parser qwen4: unknown, expected one of none, auto, .*qwen3",
        ),
        ("qwen26", "none", "--agent-tool-call-parser qwen26: unknown.*Did you mean qwen25"),
        ("auto", "none", "--agent-tool-call-parser auto: the chat template shows no form.*qwen25"),
        ("absent:x", "none", "--agent-tool-call-parser absent:x: cannot import absent"),
        (
            "none",
            "json:loads",
            "--agent-reasoning-parser json:loads: expected none, auto or one of",
        ),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_known_ones(calls, reasoning, what):
    with pytest.raises(ValueError, match=what):
        _parse(calls, reasoning)


def test_a_thoughtless_template_has_no_reasoning_by_auto():
    assert _read(_parse("none", "auto")("<think>a</think>", _TOOLS)) == (
        None,
        "<think>a</think>",
        [],
    )


_MARKS = (
    "<tool_call>|</tool_call>|<think>|</think>|<function=add>|<parameter=a>|</function>|<arg_key>|</arg_value>"
    '|[TOOL_CALLS]|<|python_tag|>|{"name": "add"|"arguments":|{|}|[add(a=1)]|[|]|(|"|\\|\n|<|channel|>|to=functions.add|é'
    "|<｜tool▁calls▁begin｜>|<invoke name=|<minimax:tool_call>|<|tool_call_start|>|<|tool_calls_section_begin|>"
).split("|")
_TEXTS = st.lists(st.sampled_from(_MARKS) | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.parametrize("name", known_calls())
def test_no_text_makes_a_parser_raise(name):
    parse = _parse(name, "qwen3")

    @settings(max_examples=30)
    @given(_TEXTS)
    def check(text):
        parsed = parse(text, _TOOLS)
        assert all(isinstance(json.loads(call["arguments"]), dict) for call in parsed.calls)

    check()

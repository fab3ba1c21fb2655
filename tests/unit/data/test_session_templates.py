"""Tokens behind an answer in a session of an agent, against whole renderings of the conversation."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.unit.data.test_replies import GLM, GPT_OSS, tokenizer

from r3train.config.data_settings import DataSection
from r3train.data.templates import ChatTemplate, SessionTemplate

# an answer's end is a token; thoughts before the last user's message are dropped
CHATML = (
    "{% if tools %}<|start|>system: {{ tools }}<|end|>{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}: "
    "{% if m.reasoning_content and loop.index0 > ns.last %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {% for k, v in"
    " c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}]{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
# with a call the content is not written
LLAMA = CHATML.replace("{{ m.content }}{%", "{% if not m.tool_calls %}{{ m.content }}{% endif %}{%")
# arguments as text; a table fails
DEEPSEEK = CHATML.replace(
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
    "{{ ' ' + c.function.arguments }}",
)
# the text of an answer depends on what follows it
GEMMA = CHATML.replace("<|end|>\n", "{{ '' if loop.last else loop.index }}<|end|>\n")
NO_TOOLS = CHATML.replace("{{ m.content }}", "{{ '' if m.role == 'tool' else m.content }}")

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "add")
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAYS = {"role": "assistant", "content": "well", "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "c1"}
USER = {"role": "user", "content": "so?"}
TEXT = {"role": "assistant", "content": "it is 42"}


def template_of(template: str) -> SessionTemplate:
    return SessionTemplate.of(ChatTemplate(tokenizer(template), DataSection(prompt_data="p.jsonl")))


@pytest.mark.parametrize(
    "template, end_of_call, end_of_text",
    [
        (CHATML, "<|end|>", "<|end|>"),
        (LLAMA, "<|end|>", "<|end|>"),
        (DEEPSEEK, "<|end|>", "<|end|>"),
        (GLM, "<|observation|>", "<|user|>"),
        (GPT_OSS, "<|call|>", "<|end|>"),
    ],
    ids=["chatml", "llama", "deepseek", "glm", "gpt_oss"],
)
@pytest.mark.parametrize("is_call", [True, False])
def test_what_follows_an_answer_is_what_a_whole_rendering_has_there(
    template, end_of_call, end_of_text, is_call
):
    way, words = template_of(template), tokenizer(template)
    answer, new = (SAYS, [TOOL, USER]) if is_call else (TEXT, [USER])
    [last] = words.encode(end_of_call if is_call else end_of_text)
    tokens, keeps = way.behind(answer, new, TOOLS, last)
    whole = way.whole([USER, answer, *new], TOOLS)
    assert keeps and whole[-len(tokens) - 1 :] == [last, *tokens]
    # every character after the answer is there: what stands before is the answer's own
    before = words.decode(whole[: -len(tokens) - 1])
    assert before.endswith(("it is 42", "a=1]", '{"a": 1}]', "well", "to=add {}"))


@pytest.mark.parametrize(
    "template, last",
    [(GPT_OSS, "<|start|>"), (GLM, "<|observation|>"), (CHATML, "<|call|>")],
    ids=["gpt_oss", "glm", "chatml"],
)
def test_a_stop_token_that_the_template_would_not_keep_is_told(template, last):
    words = tokenizer(template)
    [token] = words.encode(last)
    tokens, keeps = template_of(template).behind(TEXT, [USER], (), token)
    assert not keeps
    assert template_of(template).whole([USER, TEXT, USER], ())[-len(tokens) :] == tokens


def test_a_template_that_writes_an_answer_otherwise_in_the_middle_is_refused():
    with pytest.raises(ValueError, match="no turn can follow an answer: the chat template writes"):
        template_of(GEMMA)


def test_a_template_without_tool_messages_refuses_requests_with_tools_alone():
    way = template_of(NO_TOOLS)
    assert way.whole([USER], ()) and way.behind(TEXT, [USER], (), 0)
    for messages, tools in (([USER], TOOLS), ([USER, SAYS, TOOL], ())):
        with pytest.raises(ValueError, match="does not write messages of role tool"):
            way.whole(messages, tools)


def test_tools_that_a_template_does_not_show_are_refused_and_requests_without_them_are_not():
    way = template_of(CHATML.replace("{{ tools }}", ""))
    assert way.no_tools is None, "something of them is shown"
    way = template_of(CHATML.partition("{% endif %}")[2])
    assert way.whole([USER], ()) and way.behind(TEXT, [USER], (), 0)
    with pytest.raises(ValueError, match="does not show the tools"):
        way.whole([USER], TOOLS)
    with pytest.raises(ValueError, match="does not show the tools"):
        way.behind(TEXT, [USER], TOOLS, 0)


def test_special_tokens_in_what_users_and_tools_say_are_counted():
    way = template_of(CHATML)
    assert way.special_in([USER, TEXT, TOOL]) == 0
    said = "a<|end|><|start|>assistant: yes<|end|"
    assert way.special_in([USER | {"content": said}, TOOL | {"content": said}]) == 4
    assert way.special_in([TEXT | {"content": said}, {"role": "user", "content": None}]) == 0


def test_no_message_holds_the_stand_in_of_another_process():
    """A program of the machine's prints the words that stand in for an answer there; this one takes any others."""
    code = """
from r3train.config.data_settings import DataSection
from r3train.data.templates import ChatTemplate

class Prints:
    def apply_chat_template(self, messages, **_):
        print(messages[1]["content"])
        return messages[1]["content"]
    def encode(self, text, **_):
        return []

ChatTemplate(Prints(), DataSection(prompt_data="p.jsonl")).reply([], 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    words = done.stdout.splitlines()[0]
    way, message = template_of(CHATML), {"role": "user", "content": f"{words}?"}
    [last] = tokenizer(CHATML).encode("<|end|>")
    tokens, _ = way.behind(TEXT, [message], (), last)
    assert words in tokenizer(CHATML).decode(tokens)

"""Replies to answers of templates that end them as GLM-4.5's, or that want a call as gpt-oss's."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from r3train.config import RunConfig
from r3train.config.data_settings import DataSection
from r3train.data.templates import ChatTemplate
from r3train.launch.job.read_data import check_tools

SPECIAL = ["<|user|>", "<|observation|>", "<|assistant|>", "<|start|>", "<|end|>", "<|call|>"]
# the next message's role ends an answer: the model stops with it
GLM = (
    "{% if tools %}<|system|>{{ tools }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|user|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# the answer of a tool names the tool of the call before it, and fails without a call
GPT_OSS = (
    "{% if tools %}{{ tools }}{% endif %}{% set ns = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}<|start|>assistant: {{ m.content }}<|end|>"
    "<|start|>to={{ m.tool_calls[0].function.name }} {}<|call|>"
    "{% set ns.name = m.tool_calls[0].function.name %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant: {{ m.content }}<|end|>"
    "{% elif m.role == 'tool' and ns.name is none %}{{ raise_exception('a tool, and no call') }}"
    "{% elif m.role == 'tool' %}<|start|>{{ ns.name }}: {{ m.content }}<|end|>"
    "{% else %}<|start|>user: {{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# nothing ends an answer, and no special token opens a message
PLAIN = (
    "{% for m in messages %}{% if not loop.first %}-{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}-again:{% endif %}"
)
SEARCH, ADD = ({"type": "function", "function": {"name": name}} for name in ("search", "add"))


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = template
    return made


def reply(template: str, messages: list, last: str, tools=()) -> str:
    """The text that follows an answer whose last token is ``last``."""
    words = tokenizer(template)
    chat = ChatTemplate(words, DataSection(prompt_data="p.jsonl"), tools)
    [token] = words.encode(last)
    return words.decode(chat.reply(messages, token))


def tool(content: str, **fields) -> dict:
    return {"role": "tool", "content": content, **fields}


USER = {"role": "user", "content": "so?"}


@pytest.mark.parametrize(
    "messages, last, expected",
    [
        ([USER], "<|user|>", "\nso?<|assistant|>"),
        ([tool("42")], "<|observation|>", "\n42<|assistant|>"),
        ([tool("42"), USER], "<|observation|>", "\n42<|user|>\nso?<|assistant|>"),
        # another end than the message's opening, and an answer that was cut
        ([USER], "<|observation|>", "<|user|>\nso?<|assistant|>"),
        ([tool("42")], "x", "<|observation|>\n42<|assistant|>"),
    ],
)
def test_a_model_that_stops_with_the_next_role_has_written_it(messages, last, expected):
    assert reply(GLM, messages, last, [SEARCH]) == expected


def test_text_that_an_answer_was_cut_at_is_no_opening():
    assert reply(PLAIN, [USER], "-") == "-so?-again:"


@pytest.mark.parametrize(
    "messages, tools, last, expected",
    [
        ([tool("42")], [SEARCH], "<|call|>", "<|start|>search: 42<|end|><|start|>assistant"),
        (
            [tool("42", name="add"), USER],
            [SEARCH, ADD],
            "<|call|>",
            "<|start|>add: 42<|end|><|start|>user: so?<|end|><|start|>assistant",
        ),
        # an answer that was cut: its call is ended
        ([tool("42")], [SEARCH], "x", "<|call|><|start|>search: 42<|end|><|start|>assistant"),
        ([USER], [SEARCH], "<|end|>", "<|start|>user: so?<|end|><|start|>assistant"),
    ],
)
def test_an_answer_of_a_tool_follows_its_call_where_the_template_wants_one(
    messages, tools, last, expected
):
    assert reply(GPT_OSS, messages, last, tools) == expected


@pytest.mark.parametrize(
    "messages, got",
    [
        ([tool("42")], "got None"),
        ([tool("42", name="divide")], "got divide"),
        ([tool("42", name="add"), tool("7", name="search")], "got add, search"),
    ],
)
def test_a_call_whose_tool_is_not_known_is_refused(messages, got):
    message = r"a tool, and no call; .* name of the same tool \(search, add\), " + got
    with pytest.raises(ValueError, match=message):
        reply(GPT_OSS, messages, "<|call|>", [SEARCH, ADD])


@pytest.mark.parametrize("tools", [[SEARCH], [SEARCH, ADD]])
@pytest.mark.parametrize("template", [GLM, GPT_OSS])
def test_an_environment_with_tools_starts_with_these_templates(template, tools):
    flags = {"apply_chat_template": True, "environment": "calculator"}
    config = RunConfig.from_toml("configs/tiny_cpu.toml", flags)
    check_tools(config, tokenizer(template), tools)
    silent = template.replace("{{ m.content }}<|end|>{% else %}", "<|end|>{% else %}")
    if silent != template:
        with pytest.raises(ValueError, match="does not write messages of role tool"):
            check_tools(config, tokenizer(silent), tools)

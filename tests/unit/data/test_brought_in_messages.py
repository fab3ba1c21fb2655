"""Messages as people have them, through the dry run: each is in the prompt as it was meant, or refused by row."""

from __future__ import annotations

import json

import pytest

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.conversations import load_conversations
from r3train.data.tokenizer import load_tokenizer
from tests.unit.data import brought_in
from tests.unit.data.brought_in import FORMS, TEMPLATES, dry, jsonl, refusal, shown, with_template

ASK = {"role": "user", "content": "What is 12 times 3?"}
SAYS = {"role": "assistant", "content": "It is 36."}


def tool(name: str, *arguments: str) -> dict:
    properties = {argument: {"type": "string"} for argument in arguments}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def calls(*arguments, name: str = "search", content: str | None = None) -> dict:
    made = [
        {"id": "call00001", "type": "function", "function": {"name": name, "arguments": one}}
        for one in arguments
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


RESULT = {"role": "tool", "content": "a page", "tool_call_id": "call00001"}


def prompt_of(model, file, *flags: str) -> str:
    return shown(dry(model, file, "--apply-chat-template", *flags))


def row(*messages: dict, **columns: object) -> dict:
    return {"input": list(messages), "label": "36", **columns}


def refused(model, directory, value: object, *flags: str, **columns: object) -> str:
    """The refusal of the second row of two."""
    file = jsonl(directory, row(ASK), {"input": value, "label": "36", **columns})
    said = refusal(dry(model, file, "--apply-chat-template", *flags))
    assert f"{file}:2: " in said, said
    return said


@pytest.mark.parametrize("form", FORMS)
def test_tools_and_calls_have_no_keys_of_other_rows(form, model, tmp_path):
    """S1"""
    rows = [
        row(ASK, calls({"query": "times"}), RESULT, tools=[tool("search", "query")]),
        row(
            ASK, calls({"left": "12", "right": "3"}), RESULT, tools=[tool("times", "left", "right")]
        ),
    ]
    text = prompt_of(model, FORMS[form](tmp_path, *rows), "--tool-key", "tools")
    assert "null" not in text and "left" not in text
    assert json.loads(text.partition("<tools>")[2].partition("<user>")[0]) == rows[0]["tools"]
    assert '"arguments": {"query": "times"}' in text


def test_maps_of_arrow_are_tables(model, tmp_path):
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    function = pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, text)})
    call = pyarrow.struct({"type": text, "function": function})
    message = pyarrow.struct({"role": text, "content": text, "tool_calls": pyarrow.list_(call)})
    arguments = [("query", "times"), ("left", None)]
    made = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    rows = [[ASK, {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "content": "2"}]]
    table = pyarrow.table({"input": pyarrow.array(rows, pyarrow.list_(message))})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert '"arguments": {"query": "times"}' in prompt_of(model, tmp_path / "p.parquet")


def test_nulls_of_json_text_are_meant(model, tmp_path):
    search = json.dumps([tool("search") | {"strict": None}])
    rows = row(ASK, calls('{"query": null}'), RESULT, tools=search)
    text = prompt_of(model, jsonl(tmp_path, rows), "--tool-key", "tools")
    assert '"strict": null' in text and '{"query": null}' in text


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_text_are_joined(form, model, tmp_path):
    """S2"""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "12 times 3?"}]
    file = FORMS[form](tmp_path, row({"role": "user", "content": parts}))
    assert prompt_of(model, file) == "<user>What is\n12 times 3?<eos><assistant>"


@pytest.mark.parametrize(
    "content, what",
    [
        (None, "content is null"),
        (12, "content 12"),
        (1.5, "content 1.5"),
        (True, "content True"),
        ({"text": "hi"}, "content {'text': 'hi'}"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a part of type 'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "image"}], "a part of type 'image'"),
        ([{"type": "input_audio", "input_audio": {}}], "a part of type 'input_audio'"),
        ([{"type": "text", "text": None}], "a part of text with the text None"),
        (["hi"], "a part 'hi'"),
        ([["hi"]], "a part ['hi']"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_content_that_is_no_text_is_refused(content, what, role, model, tmp_path):
    """S2"""
    said = refused(model, tmp_path, [{"role": role, "content": content}, ASK])
    assert f"key input: message 1: {what}" in said


def test_content_that_is_missing_is_refused(model, tmp_path):
    assert "message 1: content is missing" in refused(model, tmp_path, [{"role": "user"}])
    said = refused(model, tmp_path, [ASK, {"role": "assistant", "content": None}, ASK])
    assert "message 2: content is null" in said


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "arguments", [{"query": "times"}, '{"query": "times"}'], ids=["table", "text"]
)
def test_a_call_has_its_arguments_once_whatever_the_template_wants(name, arguments, chat, tmp_path):
    """S3"""
    model = with_template(chat, tmp_path, TEMPLATES[name])
    without_content = {k: v for k, v in calls(arguments).items() if k != "content"}
    text = prompt_of(model, jsonl(tmp_path, row(ASK, without_content, RESULT)))
    assert '{"name": "search", "arguments": {"query": "times"}}' in text
    assert "None" not in text and "null" not in text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", ["", " \n", None, {}, "{}", "null"])
def test_a_call_without_arguments_has_an_empty_table(name, arguments, chat, tmp_path):
    model = with_template(chat, tmp_path, TEMPLATES[name])
    text = prompt_of(model, jsonl(tmp_path, row(ASK, calls(arguments), RESULT)))
    assert '{"name": "search", "arguments": {}}' in text


@pytest.mark.parametrize(
    "arguments",
    ["times", "[1]", '"{}"', "{'query': 1}", 5, ["a"], '{"a": NaN}', '{"a": 1'],
    ids=str,
)
def test_arguments_that_are_no_table_are_refused(arguments, model, tmp_path):
    said = refused(model, tmp_path, [ASK, calls(arguments), RESULT])
    assert "message 2: a call's arguments" in said


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_developer_is_the_system(name, chat, tmp_path):
    """S4"""
    model = with_template(chat, tmp_path, TEMPLATES[name])
    first = {"role": "developer", "content": "Answer in words."}
    text = prompt_of(model, jsonl(tmp_path, row(first, ASK)))
    assert "Answer in words." in text and "developer" not in text


@pytest.mark.parametrize("role", ["function", "ipython", "critic", "User", "human", "", None, 1])
def test_other_roles_are_refused(role, model, tmp_path):
    """S4"""
    said = refused(model, tmp_path, [{"role": role, "content": "hi"}, ASK])
    assert f"message 1: role {role!r}: expected one of system, developer, user" in said


def test_a_prompt_with_the_answer_in_it_is_refused(model, tmp_path):
    """S5"""
    assert "the last message is the assistant's" in refused(model, tmp_path, [ASK, SAYS])
    assert "the last message is the assistant's" in refused(
        model, tmp_path, json.dumps([ASK, SAYS])
    )


@pytest.mark.parametrize("form", FORMS)
def test_messages_as_json_text_are_messages(form, model, tmp_path):
    """S6"""
    text = json.dumps([{"role": "system", "content": "Be brief."}, ASK], indent=1)
    file = FORMS[form](tmp_path, {"input": text, "label": "36"})
    expected = "<system>Be brief.<eos><user>What is 12 times 3?<eos><assistant>"
    assert prompt_of(model, file) == expected


@pytest.mark.parametrize(
    "text",
    [
        str([ASK]),
        str([{"name": "it's", **ASK}]),
        f"array([{ASK}], dtype=object)",
        json.dumps(ASK),
        json.dumps({"messages": [ASK]}),
        json.dumps([{"from": "human", "value": "hi"}]),
        json.dumps([ASK, "hi"]),
        json.dumps([{"role": "user", "content": None}]),
    ],
)
def test_other_texts_of_messages_are_refused(text, model, tmp_path):
    assert "key input" in refused(model, tmp_path, text)


@pytest.mark.parametrize("text", ["[1, 2, 3] is a list. Sum it.", "[1, 2]", '{"a": 1}', "[", "{}"])
def test_a_prompt_may_be_json_that_is_no_chat(text, model, tmp_path):
    assert prompt_of(model, jsonl(tmp_path, {"input": text})) == f"<user>{text}<eos><assistant>"


def test_messages_as_json_text_need_the_template(model, tmp_path):
    said = refusal(dry(model, jsonl(tmp_path, {"input": json.dumps([ASK])})))
    assert (
        "p.jsonl:1: key input: got list, expected text (chat messages need --apply-chat-template)"
        in said
    )


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": " \n"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [],
    ],
)
def test_a_chat_that_asks_nothing_is_refused(messages, model, tmp_path):
    assert "the prompt is empty" in refused(model, tmp_path, messages)


VANISHES = {
    "a role": ("{% if m.role != 'system' %}{{ m.content }}{% endif %}", "message 1 (role system)"),
    "all but the last": ("{% if loop.last %}{{ m.content }}{% endif %}", "message 1 (role system)"),
    "content cut": ("{{ m.content[:9] }}", "leaves out"),
    "a call": ("{{ m.content }}", "message 3 (role assistant): its call of 'search'"),
    "the last turn": (
        "{% if not loop.last %}{{ m.content }}{{ m.tool_calls }}{% endif %}",
        "message 4 (role tool)",
    ),
}


@pytest.mark.parametrize("case", VANISHES)
def test_a_message_that_the_template_leaves_out_is_refused_by_row(case, chat, tmp_path):
    """A message that is left out in any way."""
    body, what = VANISHES[case]
    model = with_template(chat, tmp_path, "{% for m in messages %}" + body + "\n{% endfor %}")
    first = {"role": "system", "content": "Answer in many words."}
    file = jsonl(tmp_path, row(first, ASK, calls({}), RESULT))
    said = refusal(dry(model, file, "--apply-chat-template"))
    assert f"{file}:1: the chat template leaves out" in said and what in said


def test_a_message_whose_text_stands_in_another_one_too_is_missed(chat, tmp_path):
    first = {"role": "system", "content": "12"}
    model = with_template(
        chat, tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    said = refusal(dry(model, jsonl(tmp_path, row(first, ASK)), "--apply-chat-template"))
    assert "leaves out message 1 (role system): '12'" in said


def test_tools_that_the_template_does_not_show_are_refused(chat, tmp_path):
    model = with_template(
        chat, tmp_path, TEMPLATES["content trimmed"].replace("tools | tojson", "''")
    )
    file = jsonl(tmp_path, row(ASK, tools=[tool("search", "query")]))
    said = refusal(dry(model, file, "--apply-chat-template", "--tool-key", "tools"))
    assert f"{file}:1: the chat template leaves out the tool 'search'" in said


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_trims_or_escapes_is_there(name, chat, tmp_path):
    model = with_template(chat, tmp_path, TEMPLATES[name])
    first = {"role": "system", "content": " Say é.\n"}
    thought = {**calls({"a": 'q"'}), "content": "<think>well\nwell</think>\n\nI look.\n"}
    result = {**RESULT, "content": '{"é": ["a\\n"]}\n'}
    text = prompt_of(model, jsonl(tmp_path, row(first, ASK, thought, result)))
    assert "I look." in text


@pytest.mark.parametrize(
    "value, what",
    [
        ("search", "not JSON"),
        ({}, "got dict, expected a list of tools"),
        (["search"], "tools[0] 'search'"),
        ([{"name": "search"}], "tools[0] {'name': 'search'}"),
    ],
)
def test_tools_that_are_none_are_refused(value, what, model, tmp_path):
    assert f"key tools: {what}" in refused(
        model, tmp_path, [ASK], "--tool-key", "tools", tools=value
    )


def test_keys_without_effect_and_pictures_are_named(model, tmp_path):
    file = jsonl(
        tmp_path,
        row({**ASK, "name": None, "mood": "kind", "note": ""}, images=["a.png"]),
        row({**ASK, "mood": "kind"}, images=[]),
    )
    result = dry(model, file, "--apply-chat-template")
    said = " ".join(result.output.split())
    assert (
        f"{file}: the key mood next to a message has no effect, in 2 of the rows (first {file}:1)"
        in said
    )
    assert f"{file}: key images is not read, in 1 of the rows (first {file}:1)" in said
    assert "note" not in said.partition("warning")[2]


def test_a_key_that_the_template_reads_reaches_it(chat, tmp_path):
    model = with_template(
        chat, tmp_path, TEMPLATES["content trimmed"].replace("CALLS", "") + "{{ messages[0].mood }}"
    )
    result = dry(model, jsonl(tmp_path, row({**ASK, "mood": "kind"})), "--apply-chat-template")
    assert shown(result).endswith("kind") and "no effect" not in result.output


def conversation(model, file, **settings):
    tokenizer = load_tokenizer(model)
    data = DataSection(prompt_data=str(file), input_key="messages", **settings)
    (sample,) = load_conversations(
        PromptFile(file), data, tokenizer, (999, "limit"), max_response_len=999, stop_token_ids=[1]
    )
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


SFT = ("--loss-type", "sft", "--input-key", "messages", "--n-samples-per-prompt", "1")


def sft_refusal(model, file) -> str:
    return refusal(
        brought_in.start(
            model.parent,
            "--config",
            "configs/tiny_sft.toml",
            "--dry-run",
            "--hf-checkpoint",
            str(model),
            "--prompt-data",
            str(file),
        )
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("as_text", [False, True])
def test_what_is_trained_of_calls_is_what_was_called(form, name, as_text, chat, tmp_path):
    """As of prompts, with --loss-type sft."""
    model = with_template(chat, tmp_path, TEMPLATES[name])
    given = [{"query": "times"}, {"left": "12", "right": "3"}]
    (tmp_path / "one").mkdir()
    arguments = [json.dumps(one) for one in given] if as_text else given
    rows = [{"messages": [ASK, calls(one)]} for one in arguments]
    file = FORMS[form](tmp_path, *rows)
    data = PromptFile(file, 0, 1)
    tokenizer = load_tokenizer(model)
    (sample,) = load_conversations(
        data,
        DataSection(prompt_data=str(file), input_key="messages"),
        tokenizer,
        (999, "limit"),
        max_response_len=999,
        stop_token_ids=[1],
    )
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert trained == '<call>{"name": "search", "arguments": {"query": "times"}}</call><eos>'


def test_an_answer_of_weight_0_is_not_trained(model, tmp_path):
    """S19"""
    bad = {"role": "assistant", "content": "bad", "weight": 0}
    file = jsonl(tmp_path, {"messages": [ASK, bad, ASK, {**SAYS, "weight": 1}, ASK, SAYS]})
    assert conversation(model, file) == "It is 36.<eos>It is 36.<eos>"
    file = jsonl(
        tmp_path, {"messages": [ASK, {**bad, "weight": 0.0}, ASK, {**SAYS, "weight": None}]}
    )
    assert conversation(model, file) == "It is 36.<eos>"


@pytest.mark.parametrize(
    "messages, what",
    [
        ([ASK, {**SAYS, "weight": 0}], "every answer has weight 0"),
        ([ASK, {**SAYS, "weight": 0.5}], "message 2: weight 0.5"),
        ([ASK, {**SAYS, "content": ""}], "message 2: an answer of nothing"),
        ([ASK, {**SAYS, "weight": "0"}], "message 2: weight '0'"),
        ([{**ASK, "weight": 1}, SAYS], "message 1: weight 1"),
        ([ASK, {**SAYS, "loss": False}], "message 2: the key loss next to an answer has no effect"),
        ([ASK, {**SAYS, "train": 0}], "message 2: the key train next to an answer has no effect"),
        ([ASK, {**SAYS, "reasoning_content": "12 and 12"}], "its reasoning_content '12 and 12'"),
        ([ASK, {"role": "assistant", "content": None}], "message 2: content is null"),
        ([ASK, {"role": "gpt", "content": "36"}], "message 2: role 'gpt'"),
    ],
)
def test_a_conversation_that_would_be_trained_otherwise_is_refused(messages, what, model, tmp_path):
    """Weights, content and roles, with --loss-type sft."""
    file = jsonl(tmp_path, {"messages": [ASK, SAYS]}, {"messages": messages})
    said = sft_refusal(model, file)
    assert f"{file}:2: " in said and what in said

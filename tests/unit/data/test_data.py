"""Prompts: what is read, what is refused and how, and the order they are sampled in."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys

import jinja2
import numpy as np
import pytest

from r3train.config.data_settings import DataSection, PromptFile
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.data import PromptOrder, load_tokenizer
from r3train.data.order import MixedOrder
from r3train.data.prompts import unknown_tokens
from r3train.data.templates import ChatTemplate
from r3train.types import Prompt
from tests.all_prompts import all_prompts


class WordTokenizer:
    """One token a word; the chat template writes the roles."""

    def __call__(self, text, **options):
        return {"input_ids": [[len(word) for word in one.split()] for one in text]}

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        turns = [f"<{turn['role']}> {turn['content']}" for turn in conversation]
        return " ".join([*turns, "<assistant>"])


def load(path, tokenizer=WordTokenizer(), **settings):
    return all_prompts(path, tokenizer, **settings)


def jsonl(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


NO_SETTINGS = DataSection(prompt_data="p.jsonl")
LINE = {"input": "name some animals", "label": ["cat"]}


def test_a_line_becomes_a_prompt(tmp_path):
    metadata = {"num_words": 8}
    prompts = load(jsonl(tmp_path, LINE, {**LINE, "input": "hi", "metadata": metadata}))
    assert [prompt.prompt_id for prompt in prompts] == ["prompts.jsonl:1", "prompts.jsonl:2"]
    assert prompts[0].text == "name some animals" and prompts[0].label == ["cat"]
    assert prompts[0].token_ids.dtype == np.int32
    assert prompts[0].token_ids.tolist() == [4, 4, 7]
    assert (prompts[0].metadata, prompts[1].metadata) == ({}, metadata)


def test_keys_may_have_other_names(tmp_path):
    path = jsonl(tmp_path, {"q": "a b", "a": 4, "m": {"x": 1}})
    (prompt,) = load(path, input_key="q", label_key="a", metadata_key="m")
    assert (prompt.text, prompt.label, prompt.metadata) == ("a b", 4, {"x": 1})


def test_blank_lines_are_skipped_and_still_counted(tmp_path):
    assert [prompt.index for prompt in load(jsonl(tmp_path, LINE, "", LINE))] == [0, 2]


def test_the_chat_template_wraps_text_and_messages(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = jsonl(tmp_path, LINE, {"input": messages, "label": 1})
    first, second = load(path, apply_chat_template=True)
    assert first.text == "<user> name some animals <assistant>"
    assert second.text == "<system> be brief <user> hi <assistant>"


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path):
    import pyarrow
    import pyarrow.parquet

    lines = [{**LINE, "metadata": {"num_words": n}} for n in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "p.parquet")
    from_parquet, from_jsonl = load(tmp_path / "p.parquet"), load(jsonl(tmp_path, *lines))
    assert [(p.text, p.label, p.metadata) for p in from_parquet] == [
        (p.text, p.label, p.metadata) for p in from_jsonl
    ]
    assert [p.prompt_id for p in from_parquet] == ["p.parquet:1", "p.parquet:2", "p.parquet:3"]


def test_a_large_file_is_read_behind_a_bar_on_a_terminal_and_gives_the_same_prompts(
    tmp_path, monkeypatch
):
    line = json.dumps({"input": "one two", "metadata": {"long": "x" * 9000}})
    path = jsonl(tmp_path, *[line] * 600)
    plain = load(path)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = load(path)
    assert f"reading {path.name}" in sys.stderr.getvalue() and "100%" in sys.stderr.getvalue()
    assert [p.prompt_id for p in shown] == [p.prompt_id for p in plain] and len(plain) == 600
    with pytest.raises(ValueError, match="no such prompt file"):
        load(tmp_path / "none.jsonl")


def test_a_parquet_row_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [LINE, {**LINE, "input": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet row 2: key input is null"):
        load(tmp_path / "p.parquet")


@pytest.mark.parametrize(
    "bad, message",
    [
        ('{"input": "a" "label": 1}', r"jsonl:2:15: not JSON"),
        ({}, r"jsonl:2: key input is missing; keys there: none"),
        ({"input": " \n", "label": 1}, r"jsonl:2: key input: the prompt is empty"),
        ({"input": 7, "label": 1}, r"jsonl:2: key input: got int, expected text \(chat"),
        ({"input": [], "label": 1}, r"jsonl:2: key input: got list, expected text \(chat"),
        ({**LINE, "metadata": 3}, r"jsonl:2: key metadata must be an object, got int"),
        (
            {"input": "one two three four", "label": 1},
            r"jsonl:2: the prompt has 4 tokens, at most 3 fit \(the limit's name\)",
        ),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, bad, message):
    path = jsonl(tmp_path, LINE, bad)
    with pytest.raises(ValueError, match=r"prompts\." + message):
        load(path, limit=(3, "the limit's name"), overlong_prompts="error")


@pytest.mark.parametrize("bad", [[], 7, [{"role": "user"}], ["hi"]])
def test_bad_chat_messages_are_named(tmp_path, bad):
    with pytest.raises(ValueError, match=r"jsonl:1: key input"):
        load(jsonl(tmp_path, {"input": bad, "label": 1}), apply_chat_template=True)


def test_a_label_may_be_absent(tmp_path):
    lines = [{"input": "a"}, {"input": "a", "label": None}, {"input": "a", "label": 0}]
    assert [prompt.label for prompt in load(jsonl(tmp_path, *lines))] == [None, None, 0]


VERL = {
    "prompt": [{"role": "user", "content": "2 + 2"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 3},
    "a.b": "dotted",
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_key_with_a_dot_goes_into_tables_as_verls_files_need_it(tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    path = jsonl(tmp_path, VERL)
    if kind == "parquet":
        path = tmp_path / "verl.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), path)
    keys = {"input_key": "prompt", "metadata_key": "extra_info", "apply_chat_template": True}
    (prompt,) = load(path, label_key="reward_model.ground_truth", **keys)
    assert (prompt.text, prompt.label) == ("<user> 2 + 2 <assistant>", "4")
    assert prompt.metadata == {"split": "train", "index": 3}
    (prompt,) = load(path, label_key="a.b", **keys)
    assert prompt.label == "dotted", "a key that is there as it is written comes first"
    with pytest.raises(ValueError, match="1: key prompt.text is missing; keys there: prompt, rew"):
        load(path, input_key="prompt.text")


def test_rows_pick_lines_by_their_number_and_leave_it_to_them(tmp_path):
    path = jsonl(tmp_path, *({"input": f"{n} x"} for n in range(6)))
    assert [p.prompt_id for p in load(path, rows=(2, 4))] == [
        "prompts.jsonl:3",
        "prompts.jsonl:4",
    ]
    assert [p.index for p in load(path, rows=(4, None))] == [4, 5]


def test_prompts_that_are_too_long_are_dropped_and_told_of_once(tmp_path):
    path, notes = jsonl(tmp_path, LINE, {"input": "a b c d e"}, {"input": "a b c d"}, LINE), []
    limit = (3, "the limit's name")
    assert [prompt.index for prompt in load(path, notes=notes, limit=limit)] == [0, 3]
    first = f"{path}:2: the prompt has 5 tokens, at most 3 fit (the limit's name)"
    dropped = f"{path}: dropped 2 of 4 prompts, which are too long; the first: {first}"
    assert notes == [dropped]
    with pytest.raises(ValueError, match="drops all of 2 prompts, which are too long"):
        load(path, rows=(1, 3), notes=notes, limit=limit)


class Chat(WordTokenizer):
    def apply_chat_template(self, conversation, *, tools=None, thinking=True, **options):
        text = super().apply_chat_template(conversation, **options)
        return f"{text} thinking={thinking} tools={json.dumps(tools)}"


def test_the_chat_template_gets_its_variables_and_the_tools_of_a_row(tmp_path):
    tools = [{"type": "function", "function": {"name": "search"}}]
    rows = [{**LINE, "tools": tools}, {**LINE, "tools": json.dumps(tools)}, {**LINE, "tools": []}]
    options = {"tokenizer": Chat(), "apply_chat_template": True, "tool_key": "tools"}
    options["apply_chat_template_kwargs"] = {"thinking": False}
    texts = [prompt.text for prompt in load(jsonl(tmp_path, *rows, LINE), **options)]
    assert texts[0] == texts[1]
    assert texts[0].endswith(f"thinking=False tools={json.dumps(tools)}")
    assert texts[2] == texts[3] and texts[2].endswith("tools=null")
    with pytest.raises(ValueError, match="jsonl:1: key tools: got dict, expected a list of tools"):
        load(jsonl(tmp_path, {**LINE, "tools": {}}), **options)


def test_messages_of_parquet_lack_the_fields_that_only_others_have(tmp_path):
    import pyarrow
    import pyarrow.parquet

    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "2"}
    row = {"input": [{"role": "user", "content": "hi"}, answer, result]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "p.parquet")
    seen = []

    class Records(WordTokenizer):
        def apply_chat_template(self, conversation, **options):
            seen[:] = conversation
            return "hi f 2"

    load(tmp_path / "p.parquet", Records(), apply_chat_template=True)
    table = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert seen == [row["input"][0], {**answer, "content": "", "tool_calls": [table]}, result]


def test_a_chat_template_that_fails_names_the_line(tmp_path):
    class Broken(WordTokenizer):
        def apply_chat_template(self, *args, **options):
            raise RuntimeError("no such role")

    with pytest.raises(ValueError, match="jsonl:1: the chat template fails: no such role"):
        load(jsonl(tmp_path, LINE), Broken(), apply_chat_template=True)


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "p.jsonl",
            json.dumps(LINE).encode() + b'\n{"input": "\xff"}\n',
            "jsonl:2: not UTF-8 at byte 12",
        ),
        (
            "p.jsonl",
            json.dumps(LINE).encode() + b'\n{"input": "a \\ud800"}\n',
            r"jsonl:2: character 3 of the prompt is '\\ud800', half of a surrogate pair",
        ),
        ("p.jsonl", b"", r"p\.jsonl: holds no prompts"),
        ("p.jsonl", b"\n\n", r"p\.jsonl: holds no prompts"),
        ("p.jsonl", None, r"p\.jsonl: no such prompt file \(prompt_data\)"),
        ("p.csv", b"a", r"from \.jsonl or \.parquet, got '\.csv'"),
        ("p.parquet", b"no parquet", r"p\.parquet: cannot read as parquet"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_by_name(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: not JSON"):
        load_tokenizer(tmp_path)


def test_torchvision_imports_beside_this_torch_however_often_its_ops_are_declared():
    declare_torchvision_ops()
    declare_torchvision_ops()
    importlib.import_module("torchvision")
    declare_torchvision_ops()


def drawn_by(order, start: int, count: int) -> list[int]:
    return [order.index(cursor) for cursor in range(start, start + count)]


def test_every_epoch_draws_every_prompt_once_in_another_order():
    order = PromptOrder(50, seed=1)
    first, second = drawn_by(order, 0, 50), drawn_by(order, 50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != sorted(first)


def test_the_order_depends_on_seed_and_cursor_alone():
    everything = drawn_by(PromptOrder(7, seed=3), 0, 100)
    for start in (0, 1, 6, 7, 8, 50):
        for count in (0, 1, 7, 20, 50):
            part = drawn_by(PromptOrder(7, seed=3), start, count)
            assert part == everything[start : start + count]
    assert drawn_by(PromptOrder(7, seed=4), 0, 100) != everything


def test_without_shuffling_the_order_is_the_file():
    assert drawn_by(PromptOrder(3, seed=1, shuffle=False), 2, 5) == [2, 0, 1, 2, 0]


def test_weights_are_shares_of_what_is_drawn():
    order = MixedOrder([50, 2000, 3], [0.7, 0.3, 0.0001], seed=1)
    files = [0 if index < 50 else 1 if index < 2050 else 2 for index in drawn_by(order, 0, 3000)]
    assert [files[:1000].count(file) for file in range(3)] == [699, 300, 1]
    assert [files.count(file) for file in range(3)] == [2097, 900, 3]
    assert files[:20] != sorted(files[:20])


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_file_of_a_mixture_is_drawn_in_epochs_of_its_own(shuffle):
    sampled = drawn_by(MixedOrder([5, 40], [1, 3], 1, shuffle), 0, 200)
    first = [index for index in sampled if index < 5]
    second = [index for index in sampled if index >= 5]
    for start in range(0, len(first) - 5, 5):
        assert sorted(first[start : start + 5]) == list(range(5))
    assert sorted(second[:40]) == list(range(5, 45))
    if not shuffle:
        assert first[:6] == [0, 1, 2, 3, 4, 0] and len(first) == 50


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_file_of_a_mixture_is_drawn_without_a_break_over_all_blocks(shuffle):
    """Weights hold within each 1,000 draws; a file goes on where it was, in its own order."""
    sizes, seed = [70, 2000], 5
    sampled = drawn_by(MixedOrder(sizes, [1, 3], seed, shuffle), 0, 3000)
    first = [index for index in sampled if index < 70]
    second = [index - 70 for index in sampled if index >= 70]
    assert (len(first), len(second)) == (750, 2250)
    for size, file_rows in zip(sizes, (first, second)):
        assert file_rows == drawn_by(PromptOrder(size, seed, shuffle), 0, len(file_rows))


def test_the_files_of_a_mixture_are_mixed_anew_in_each_block_and_for_each_seed():
    def files(seed, shuffle=True):
        return [n >= 70 for n in drawn_by(MixedOrder([70, 2000], [1, 3], seed, shuffle), 0, 2000)]

    one, other = files(5), files(6)
    assert one[:1000] != one[1000:] and sorted(one[:1000]) == sorted(one[1000:])
    assert one != other and sorted(one) == sorted(other)
    spread = files(5, shuffle=False)
    assert spread[:1000] == spread[1000:] == files(6, shuffle=False)[:1000]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_depends_on_seed_and_cursor_alone(shuffle):
    everything = drawn_by(MixedOrder([7, 9], [1, 2], 3, shuffle), 0, 2100)
    for start in (0, 1, 6, 999, 1000, 2050):
        part = drawn_by(MixedOrder([7, 9], [1, 2], 3, shuffle), start, 30)
        assert part == everything[start : start + 30]
    assert drawn_by(MixedOrder([7, 9], [1, 2], 4), 0, 100) != everything[:100]


def test_an_epoch_is_shuffled_once_and_not_for_every_draw(monkeypatch):
    shuffled, made = [], np.random.default_rng

    def counted(seed):
        shuffled.append(seed)
        return made(seed)

    monkeypatch.setattr("r3train.data.order.np.random.default_rng", counted)
    order = MixedOrder([70, 90], [1, 2], 57)
    for cursor in range(60):
        order.index(cursor)
    assert [seed for seed in shuffled if len(seed) == 2] == [(57, 0)] * 2


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a.jsonl", ("a.jsonl", 0, None, None)),
        ("d/a.jsonl@[0:1000]*0.3", ("d/a.jsonl", 0, 1000, 0.3)),
        ("a.jsonl@[5:]", ("a.jsonl", 5, None, None)),
        ("a.jsonl@[:7]", ("a.jsonl", 0, 7, None)),
        ("a,b*c.jsonl*2", ("a,b*c.jsonl", 0, None, 2.0)),
    ],
)
def test_a_file_of_prompts_may_have_a_slice_and_a_weight(text, expected):
    file = PromptFile.of(text)
    assert (str(file.path), file.start, file.stop, file.weight) == expected


@pytest.mark.parametrize(
    "files, message",
    [
        (["a@[3:3]"], "no row, or no weight, is left"),
        (["a*0"], "no row, or no weight, is left"),
        (["a*1..2"], "expected PATH"),
        (["a*0.5", "b"], "give every file a weight"),
        ([], "at least 1"),
    ],
)
def test_files_that_make_no_sense_are_refused(files, message):
    with pytest.raises(ValueError, match=message):
        DataSection(prompt_data=files)


class Characters:
    """One token a character, but 7 for <end>; the template is Jinja."""

    def __init__(self, template):
        self.template = jinja2.Template(template)

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        return [7 if part == "<end>" else ord(part) for part in re.findall("<end>|.", text, re.S)]

    def apply_chat_template(self, conversation, *, tokenize, **variables):
        return self.template.render(messages=conversation, **variables)

    def text(self, ids):
        return "".join("<end>" if i == 7 else chr(i) for i in ids)


# as Qwen3's does, it writes thoughts into the last message alone
THINKING = (
    "{% if tools %}<system>{{ tools }}<end>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
RESULT = [{"role": "tool", "content": "42"}, {"role": "user", "content": "so?"}]


@pytest.mark.parametrize(
    "template, last, expected",
    [
        (THINKING, 7, "\n<tool>42<end>\n<user>so?<end>\n<assistant>"),
        # a turn that was cut, or ended with another token: the template's end comes first
        (THINKING, ord("x"), "<end>\n<tool>42<end>\n<user>so?<end>\n<assistant>"),
        (ENDLESS, 7, "\ntool: 42\nuser: so?\nassistant:"),
        (ENDLESS, ord("\n"), "tool: 42\nuser: so?\nassistant:"),
    ],
)
def test_a_reply_is_what_the_template_writes_behind_an_answer(template, last, expected):
    tokenizer = Characters(template)
    chat = ChatTemplate(tokenizer, NO_SETTINGS, tools=[{"name": "search"}])
    assert tokenizer.text(chat.reply(RESULT, last)) == expected


def test_the_tokens_of_a_reply_are_those_of_the_whole_conversation():
    """For a template that changes nothing in earlier messages."""
    tokenizer = Characters(THINKING.replace("<think></think>", ""))
    chat = ChatTemplate(tokenizer, NO_SETTINGS)
    asked = [{"role": "user", "content": "?"}]
    whole = [*asked, {"role": "assistant", "content": "call"}, *RESULT]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = [*tokenizer.encode(text + "call<end>", add_special_tokens=False)]
    ids += chat.reply(RESULT, ids[-1])
    assert tokenizer.text(ids) == tokenizer.apply_chat_template(
        whole, tokenize=False, add_generation_prompt=True
    )


def test_a_template_that_leaves_the_answer_out_or_fails_is_refused():
    for template, said in (
        ("{{ messages[-1].content }}", "does not write the content of the answer before it once"),
        ("{{ messages[0].content / 2 }}", "the chat template fails"),
    ):
        with pytest.raises(ValueError, match=said):
            ChatTemplate(Characters(template), NO_SETTINGS).reply(RESULT, 7)


def test_tools_that_the_template_does_not_show_are_refused():
    tools = [{"type": "function", "function": {"name": "search"}}]
    ChatTemplate(Characters(THINKING), NO_SETTINGS, tools=tools).check_tools()
    with pytest.raises(ValueError, match="chat template does not show them"):
        ChatTemplate(Characters(ENDLESS), NO_SETTINGS, tools=tools).check_tools()
    known = "{% if m.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}"
    left_out = THINKING.replace("m in messages", "m in messages if m.role != 'tool'")
    for template, said in (
        (THINKING.replace("<{{ m.role }}>", known), "a reply: the chat template fails"),
        (left_out, "does not write messages of role tool"),
    ):
        with pytest.raises(ValueError, match=said):
            ChatTemplate(Characters(template), NO_SETTINGS, tools=tools).check_tools()


@pytest.mark.parametrize("lengths", [[0], [0, 3], [3, 0, 3], [3, 3, 0]])
def test_prompts_without_tokens_have_no_share_of_unknown_ones(lengths):
    prompts = [
        Prompt(f"p{n}", n, "", np.ones(length, np.int32), None, {})
        for n, length in enumerate(lengths)
    ]
    assert unknown_tokens(prompts, 7) is None
    if any(lengths):
        with pytest.raises(ValueError, match="is the tokenizer's unknown token"):
            unknown_tokens(prompts, 1)


def test_rows_without_tools_of_their_own_get_those_of_the_environment(tmp_path):
    file_rows, common = ([{"type": "function", "function": {"name": n}}] for n in ("own", "common"))
    options = {"tokenizer": Chat(), "apply_chat_template": True, "tool_key": "tools"}
    rows = jsonl(tmp_path, {**LINE, "tools": file_rows}, LINE)
    texts = [prompt.text for prompt in load(rows, tools=common, **options)]
    assert [json.loads(text.partition("tools=")[2]) for text in texts] == [file_rows, common]

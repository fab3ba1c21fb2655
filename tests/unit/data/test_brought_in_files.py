"""Files as libraries and strangers write them: rows with the right tokens, or refused by file, row and key."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.conversations import load_conversations
from r3train.data.prompts import load_prompts
from r3train.data.tokenizer import load_tokenizer
from tests.unit.data.brought_in import TEMPLATES, dry, jsonl, refusal, shown, start, with_template
from tests.unit.data.test_brought_in_messages import ASK, RESULT, SAYS, calls, tool

Writer = Callable[[list[dict[str, Any]], Path], object]


def by_pandas(rows: list[dict[str, Any]], path: Path) -> object:
    import pandas

    frame = pandas.DataFrame(rows)
    is_parquet = path.suffix == ".parquet"
    return (
        frame.to_parquet(path) if is_parquet else frame.to_json(path, orient="records", lines=True)
    )


def by_polars(rows: list[dict[str, Any]], path: Path) -> object:
    import polars

    frame = polars.DataFrame(rows, infer_schema_length=None)
    return frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_ndjson(path)


def by_datasets(rows: list[dict[str, Any]], path: Path) -> object:
    import datasets

    made = datasets.Dataset.from_list(rows)
    return made.to_parquet(path) if path.suffix == ".parquet" else made.to_json(path)


def by_duckdb(rows: list[dict[str, Any]], path: Path) -> object:
    import duckdb

    lines = jsonl(path.parent, *rows).rename(path.with_suffix(".given"))
    kind = "PARQUET" if path.suffix == ".parquet" else "JSON"
    query = (
        f"COPY (FROM read_json('{lines}', format='newline_delimited')) TO '{path}' (FORMAT {kind})"
    )
    return duckdb.sql(query)


WRITERS: dict[str, Writer] = {
    "pandas": by_pandas,
    "polars": by_polars,
    "datasets": by_datasets,
    "duckdb": by_duckdb,
}
every_writer = pytest.mark.parametrize("writer", WRITERS)
every_suffix = pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
PROMPTS = [
    {
        "input": [{"role": "system", "content": 'Say é / "q".\n'}, ASK],
        "tools": [tool("search", "query")],
        "label": 36,
        "metadata": {"level": 1},
    },
    {
        "input": [ASK, calls({"query": "times"}), RESULT],
        "tools": [tool("search", "query")],
        "label": None,
        "metadata": {"page": "a"},
    },
    {
        "input": [ASK, calls({"left": "12", "right": "3"}, name="times"), RESULT],
        "tools": [tool("times", "left", "right"), tool("search", "query")],
        "label": 7,
        "metadata": {"level": 2},
    },
]
CONVERSATIONS = [
    {"messages": [ASK, {**SAYS, "weight": 0}, ASK, SAYS]},
    {"messages": [ASK, calls({"query": "times"}), RESULT, SAYS]},
    {"messages": [ASK, calls({"left": "12", "right": "3"}, name="times"), RESULT, SAYS]},
]


@every_writer
@every_suffix
def test_prompts_that_a_library_wrote_are_those_that_it_was_given(writer, suffix, model, tmp_path):
    path = tmp_path / f"written{suffix}"
    WRITERS[writer](PROMPTS, path)
    data = DataSection(prompt_data=str(path), apply_chat_template=True, tool_key="tools")
    tokenizer = load_tokenizer(model)
    found, expected = (
        load_prompts(PromptFile(file), data, tokenizer, (9999, "limit"))
        for file in (path, jsonl(tmp_path, *PROMPTS))
    )
    for got, given in zip(found, expected, strict=True):
        assert got.text == given.text and got.token_ids.tolist() == given.token_ids.tolist()
        assert (got.label, type(got.label)) == (given.label, type(given.label))
        known = {key: value for key, value in got.metadata.items() if value is not None}
        assert known == given.metadata
    flags = ("--apply-chat-template", "--tool-key", "tools")
    assert shown(dry(model, Path(f"{path}@[2:3]"), *flags)) == expected[2].text


@every_writer
@every_suffix
@pytest.mark.parametrize("template", ["any role, arguments as JSON", "arguments by items"])
def test_conversations_that_a_library_wrote_train_the_same_tokens(
    writer, suffix, template, chat, tmp_path
):
    model = with_template(chat, tmp_path, TEMPLATES[template])
    path = tmp_path / f"written{suffix}"
    WRITERS[writer](CONVERSATIONS, path)
    data = DataSection(prompt_data=str(path), input_key="messages")
    found, expected = (
        load_conversations(
            PromptFile(file),
            data,
            load_tokenizer(model),
            (9999, "limit"),
            max_response_len=9999,
            stop_token_ids=[1],
        )
        for file in (path, jsonl(tmp_path, *CONVERSATIONS))
    )
    for got, given in zip(found, expected, strict=True):
        assert got.token_ids.tolist() == given.token_ids.tolist()
        assert got.loss_mask.tolist() == given.loss_mask.tolist() and given.loss_mask.any()


GOOD = json.dumps({"input": "What?", "label": "36"}).encode() + b"\n"
LINES = {
    "a mark of byte order": (b"\xef\xbb\xbf" + GOOD, "1:1: not JSON"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "1: not UTF-8"),
    "a table of commas": (b"input,label\nWhat?,36\n", "1:1: not JSON"),
    "Python's text of a row": (GOOD + b"{'input': 'What?'}\n", "2:2: not JSON"),
    "one list over lines": (b"[\n" + GOOD, "1: JSON over several lines"),
    "a list in a line": (b"[" + GOOD.strip() + b"]\n", "1: expected a JSON object per line"),
    "a number of 5,001 digits": (
        b'{"input": "What?", "label": 1' + b"0" * 5000 + b"}\n",
        "1: Exceeds",
    ),
    "half a pair in metadata": (
        GOOD + b'{"input": "What?", "metadata": {"t": "\\ud83d"}}\n',
        "2: key metadata.t: character 1",
    ),
    "a call as the last API had it": (
        GOOD
        + json.dumps(
            {"input": [ASK, {"role": "assistant", "function_call": {"name": "f"}}, RESULT]}
        ).encode(),
        "2: key input: message 2: function_call",
    ),
    "keys in capitals": (
        b'{"input": [{"Role": "user", "Content": "hi"}]}\n',
        "1: key input: message 1: role None",
    ),
    "a list in a list": (
        b'{"input": [[{"role": "user", "content": "hi"}]]}\n',
        "1: key input: message 1:",
    ),
    "metadata as JSON text": (
        b'{"input": "What?", "metadata": "{}"}\n',
        "1: key metadata must be an object",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_lines_that_are_no_rows_are_refused_by_place(case, model, tmp_path):
    content, said = LINES[case]
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    assert f"{file}:{said}" in refusal(dry(model, file, "--apply-chat-template"))


def columns(**values: Any) -> dict[str, Any]:
    return {"input": pyarrow.array(["What?"]), **values}


COLUMNS = {
    "a time as the label": ({"label": pyarrow.array([datetime(2020, 1, 1)])}, "key label is"),
    "bytes as the label": ({"label": pyarrow.array([b"36"])}, "key label is b'36'"),
    "bytes as the prompt": ({"input": pyarrow.array([b"What?"])}, "key input: got bytes"),
    "a map as metadata": (
        {"metadata": pyarrow.array([[("a", 1)]], pyarrow.map_("string", "int64"))},
        "key metadata[0] is ('a', 1)",
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_that_are_no_json_are_refused_by_row_and_key(case, model, tmp_path):
    values, said = COLUMNS[case]
    file = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns(**values)), file)
    assert f"{file} row 1: {said}" in refusal(dry(model, file))


def test_a_number_of_32_bits_is_the_one_that_was_written(model, tmp_path):
    file = tmp_path / "p.parquet"
    label = pyarrow.array([0.1, None, 3e-5, 36.0], "float32")
    pyarrow.parquet.write_table(pyarrow.table({"input": ["What?"] * 4, "label": label}), file)
    data = DataSection(prompt_data=str(file))
    found = load_prompts(PromptFile(file), data, load_tokenizer(model), (99, "limit"))
    assert [prompt.label for prompt in found] == [0.1, None, 3e-5, 36]


def test_a_key_of_tools_that_no_row_has_is_named(model, tmp_path):
    file = jsonl(tmp_path, {"input": [ASK], "tools": [tool("search")]}, {"input": [ASK]})
    flags = ("--apply-chat-template", "--tool-key")
    said = " ".join(dry(model, file, *flags, "tool").output.split())
    assert f"{file}: no row has tools (key tool)" in said
    assert "no row has tools" not in dry(model, file, *flags, "tools").output


@pytest.mark.parametrize(
    "answer, said",
    [
        ("It is 36.<eos>", "the special token '<eos>' stands in a message, in 1 of the rows"),
        ("<pad>It is 36.", None),
    ],
)
def test_an_end_that_stands_in_an_answer_is_named(answer, said, model, tmp_path):
    file = jsonl(tmp_path, {"messages": [ASK, {**SAYS, "content": answer}]})
    result = sft(model, file)
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert said in output if said else "special token" not in output


def test_conversations_as_python_prints_them_are_refused_by_row_once(model, tmp_path):
    said = refusal(sft(model, jsonl(tmp_path, {"messages": str([ASK, SAYS])})))
    assert said.count("p.jsonl:1: ") == 1 and "as Python prints them" in said


def sft(model: Path, file: Path) -> Any:
    flags = ("--config", "configs/tiny_sft.toml", "--dry-run", "--no-use-rollout-routing-replay")
    flags += ("--hf-checkpoint", str(model), "--rollout-max-response-len", "99")
    return start(model.parent, *flags, "--prompt-data", str(file))

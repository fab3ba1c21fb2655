"""A harness's row, from a real session of a small program; and a program for each row."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing

import pytest

from benchmarks import agent_harnesses as table
from benchmarks.agent_endpoint import made_tokenizer
from r3train.engine.parser_process import Parser

_PROGRAM = """
import json, sys
from openai import OpenAI
from task import add, judge, model, prompt

tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": prompt}]
ask = lambda name: OpenAI().chat.completions.create(model=name, messages=messages, tools=[tool])
message = ask(sys.argv[1]).choices[0].message
messages += [message.model_dump(exclude_none=True)]
(call,) = message.tool_calls
sum = add(**json.loads(call.function.arguments)) + int(sys.argv[2])
messages += [{"role": "tool", "tool_call_id": call.id, "content": str(sum)}]
judge(ask(sys.argv[1]).choices[0].message.content)
"""


@pytest.fixture(scope="module")
def model():
    tokenizer = made_tokenizer()
    with closing(Parser("qwen25", "qwen3", tokenizer, {})) as parser:
        yield table.Model(tokenizer, parser)


@pytest.mark.parametrize(
    "arguments, cells",
    [
        ("r3train 0", ["chat/completions", "1 / 2", "works"]),
        ("r3train 1", ["chat/completions", "1 / 2", "no: the answer is wrong"]),
        ("gpt-4.1 0", ["", "0 / 0", "no: .*; 1 refused: the model 'gpt-4.1' is not the one"]),
    ],
)
async def test_a_row_says_whether_a_harness_ran_its_calls_and_what_was_refused(
    model, arguments, cells, tmp_path, monkeypatch
):
    (tmp_path / "asks.py").write_text(_PROGRAM)
    monkeypatch.setattr(table, "EXAMPLES", tmp_path)
    monkeypatch.setattr(table, "interpreter", lambda directory: sys.executable)
    how = argparse.Namespace(delay_s=0.0, timeout_s=120.0, env=[])
    row = await table.played(f"asks.py {arguments}", table.adds, tmp_path, model, how)
    found = [cell.strip() for cell in table.table_row("x", {"x": "1"}, row).split("|")[3:6]]
    assert found[:2] == cells[:2] and re.match(cells[2], found[2]), row["failure"]


def test_each_program_has_a_row_and_each_row_its_program():
    named = {word for h in table.HARNESSES.values() for row in h.rows for word in row.split()}
    programs = {file.name for file in table.PROGRAMS.iterdir() if file.is_file()}
    assert programs - {"task.py", "sums.py"} <= named
    files = {word for word in named if word.endswith((".py", ".sh", ".mjs"))}
    assert files <= programs | {file.name for file in table.EXAMPLES.iterdir()}

"""examples/math: the preparation script on files of the data sets' form, read as a recipe reads them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tests.unit.data.test_data import WordTokenizer
from tests.unit.rewards.test_scoring import sample, scored

from r3train.config import RunConfig
from r3train.config.data_settings import PromptFile
from r3train.data import load_prompts

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "configs/qwen3_30b_a3b.toml"
NUMBERS = {"three": "3", "4,000": "4000", "unsure": "1"}
# rows of the published forms, with problems of our own
TRAIN = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Say {name}.  Last line: Answer: $Answer", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{name}-{copy}"},
    }
    for copy in range(3)
    for name, answer in NUMBERS.items()
]
TRAIN[2]["reward_model"]["ground_truth"] = "2"  # another row of this prompt says 1
TEST = [
    {
        "problem": "Half of $\\pi$?",
        "solution": "It is $\\boxed{\\frac{\\pi}{2}}$.",
        "answer": "\\frac{\\pi}{2}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    }
]


def prepare(directory: Path, train: list, test: list) -> subprocess.CompletedProcess:
    """Run the script in a directory, on train.parquet and test.jsonl in it."""
    parquet.write_table(pyarrow.Table.from_pylist(train), directory / "train.parquet")
    (directory / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
    script = [sys.executable, str(ROOT / "examples/math/prepare.py")]
    files = ["--train", "train.parquet", "--test", "test.jsonl"]
    return subprocess.run([*script, *files], capture_output=True, text=True, cwd=directory)


def test_the_prepared_files_are_those_that_the_recipes_read(tmp_path, monkeypatch):
    done = prepare(tmp_path, TRAIN, TEST)
    assert done.returncode == 0, done.stderr
    assert "math_train.parquet: 2 prompts; left out: 6 repeats and 1 prompts of" in done.stdout
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_toml(RECIPE)
    (train,) = config.data.prompt_files
    (math500,) = config.eval_sets
    for path, label, right, wrong in (
        (train.path, "3", "Answer: 3", "Answer: 4"),
        (math500.path, TEST[0]["answer"], r"so \boxed{\dfrac{\pi}{2}}", r"\boxed{\pi}"),
    ):
        prompts = load_prompts(PromptFile(path), config.data, WordTokenizer(), (1 << 20, "none"))
        assert prompts[0].label == label
        made = [replace(sample(text), prompt=prompts[0]) for text in (right, wrong)]
        assert scored(config.data, *made) == [1.0, 0.0]
    assert prompts[0].metadata == {
        "unique_id": "test/algebra/1.json",
        "subject": "Algebra",
        "level": 1,
    }


@pytest.mark.parametrize(
    "file, key, value, line",
    [
        ("train", "prompt", "Say three.", "train.parquet row 1: key prompt: expected messages of"),
        ("train", "reward_model", {"style": "s"}, "row 1: key reward_model.ground_truth is miss"),
        ("train", "reward_model", {"ground_truth": 3}, "ground_truth: expected text, got '3'"),
        ("test", "problem", None, "test.jsonl:1: key problem is null"),
        ("test", "answer", 3, "test.jsonl:1: key answer: expected text, got '3'"),
        ("test", "level", None, "test.jsonl:1: key level is null"),
    ],
)
def test_another_form_is_refused_by_row_and_key(tmp_path, file, key, value, line):
    rows = {"train": copy.deepcopy(TRAIN), "test": copy.deepcopy(TEST)}
    for row in rows[file]:  # all: a column of a parquet file has one type
        row[key] = value
    done = prepare(tmp_path, **rows)
    assert done.returncode == 2 and line in done.stderr, done.stderr

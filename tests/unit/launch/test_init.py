"""A first recipe from a model and a file of prompts: it passes a dry run and says why it is as it is."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from r3train.cli import main

# the words are those of the tiny model's vocabulary
CHAT = [{"role": "user", "content": "name fruits"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, result.output
    return result.output


def data_of(directory: Path, rows: list[dict], name: str = "data.jsonl") -> Path:
    file = directory / name
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def made(model: Path, data: Path, output: Path, *flags: str) -> dict[str, Any]:
    """The recipe that was made; every setting has a reason, and training takes it."""
    run("init", "--model", model, "--data", data, "--output", output, *flags)
    text = output.read_text()
    for line in text.splitlines():
        assert not line or line[0] in "#[" or "#" in line or "bf16" in text, line
    assert Path(text.splitlines()[0].removeprefix("#:schema ")).is_file()
    assert "reward of the first prompt" in run("train", "--config", output, "--dry-run")
    return {name: v for table in tomllib.loads(text).values() for name, v in table.items()}


def test_the_demos_files_make_a_recipe_that_a_run_takes(tiny, tmp_path):
    recipe = made(tiny / "model", tiny / "prompts.jsonl", tmp_path / "run.toml")
    assert recipe == {
        "hf_checkpoint": str(tiny / "model"),
        "prompt_data": str(tiny / "prompts.jsonl"),
        "input_key": "input",
        "label_key": "label",
        "rm_type": "accepted_words",
        "num_rollout": 6,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 256,
        "max_tokens_per_gpu": 4096,
        "lr": 1e-6,
        "use_rollout_routing_replay": True,
        "enable_r3_correctness_check": True,
    }
    assert len((tmp_path / "run.toml").read_text().splitlines()) < 35


def test_a_file_that_is_there_is_not_replaced(tiny, tmp_path):
    output = tmp_path / "run.toml"
    output.write_text("mine")
    words = ("--model", tiny / "model", "--data", tiny / "prompts.jsonl", "--output", output)
    assert "run.toml: is there already" in run("init", *words, code=2)
    assert output.read_text() == "mine"


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"question": "name fruits", "answer": "cat #### 3"}, ("question", "answer", "gsm8k")),
        ({"problem": "name tools", "solution": "\\frac12"}, ("problem", "solution", "math")),
        ({"prompt": "name tools", "target": "B"}, ("prompt", "target", "gpqa")),
        ({"id": 3, "words": "name tools", "label": "saw"}, ("words", "label", "exact_match")),
    ],
)
def test_keys_and_reward_follow_from_the_rows(row, expected, tiny, tmp_path):
    recipe = made(tiny / "model", data_of(tmp_path, [row] * 2), tmp_path / "run.toml")
    assert (recipe["input_key"], recipe["label_key"], recipe["rm_type"]) == expected
    assert "apply_chat_template" not in recipe and recipe["rollout_batch_size"] == 2


def test_chat_messages_with_a_nested_label_take_the_template(tiny, tmp_path):
    model = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    row = {"data_source": "x", "prompt": CHAT, "reward_model": {"ground_truth": "12"}}
    data = data_of(tmp_path, [row] * 2, "train.parquet")
    recipe = made(model, data, tmp_path / "run.toml")
    assert recipe["apply_chat_template"] and recipe["input_key"] == "prompt"
    assert (recipe["label_key"], recipe["rm_type"]) == ("reward_model.ground_truth", "math")


def test_gpus_get_the_topology_that_the_estimate_finds(tiny, tmp_path):
    flags = ("--gpus", "8", "--gpu-memory-gb", "0.004")
    recipe = made(tiny / "model", tiny / "prompts.jsonl", tmp_path / "run.toml", *flags)
    assert recipe["world_size"] == 8 and recipe["bf16"]
    assert recipe["expert_model_parallel_size"] > 1
    words = ("--model", tiny / "model", "--data", tiny / "prompts.jsonl")
    small = ("--output", tmp_path / "no.toml", "--gpus", 1, "--gpu-memory-gb", 0.001)
    assert "nothing fits 1 GPUs" in run("init", *words, *small, code=2)
    assert not (tmp_path / "no.toml").exists()


@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "data.jsonl: holds no prompts"),
        ([{"id": 1}], "data.jsonl:1: no key holds text or chat messages; keys there: id"),
        (
            [{"input": "name tools"}],
            "run.toml is written, and a run of it is refused: --custom-rm-path my_reward",
        ),
    ],
)
def test_what_cannot_be_guessed_is_said(rows, said, tiny, tmp_path):
    words = ("--model", tiny / "model", "--data", data_of(tmp_path, rows))
    output = run("init", *words, "--output", tmp_path / "run.toml", code=2)
    assert said in " ".join(output.replace(str(tmp_path) + "/", "").split()), output

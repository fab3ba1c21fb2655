"""examples/gsm8k: the preparation script on files of the data set's form, and its recipe's reward."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from tests.unit.data.test_data import WordTokenizer
from tests.unit.rewards.test_scoring import sample, scored

from r3train.cli import main
from r3train.config import RunConfig
from r3train.config.data_settings import PromptFile
from r3train.data import load_prompts
from r3train.data.tokenizer import load_tokenizer
from r3train.launch.job.preflight import preflight

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/gsm8k"
RECIPE = ROOT / "configs/olmoe_1b_7b_one_node.toml"
# rows of the published form, with numbers of our own
ROWS = [
    {"question": "Ann has 3 hens and 4 cows. Heads?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,000 and a half more. Price?", "answer": "So it is.\n#### 1,500"},
]


def prepare(directory, rows, name="train.jsonl"):
    source = directory / name
    if source.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--train", str(source), "--test", str(source), "--output", str(directory / "out")]
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), *files], capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ["train.jsonl", "train-00000-of-00001.parquet"])
def test_the_prepared_files_are_read_and_scored_as_the_recipe_says(tmp_path, name):
    done = prepare(tmp_path, ROWS, name)
    assert done.returncode == 0, done.stderr
    assert "train.parquet: 2 prompts" in done.stdout and "test.parquet: 2 p" in done.stdout
    data = RunConfig.from_toml(RECIPE).data
    file = PromptFile(tmp_path / "out/test.parquet")
    prompts = load_prompts(file, data, WordTokenizer(), (1 << 20, "no limit"))
    assert [prompt.label for prompt in prompts] == ["7", "1,500"]
    assert prompts[0].text.startswith("<user> Ann has 3 hens") and "after ####." in prompts[0].text
    answers = ["7 animals, so #### 7", "#### 1500", r"it is \boxed{1500.00}", "#### 15"]
    made = [sample(text) for text in answers]
    made = [replace(s, prompt=prompts[min(n, 1)]) for n, s in enumerate(made)]
    assert scored(data, *made) == [1.0, 1.0, 1.0, 0.0]


def test_a_file_of_another_form_is_named(tmp_path):
    done = prepare(tmp_path, [*ROWS, {"question": "q", "answer": "no mark"}])
    assert done.returncode == 2 and "train.jsonl:3: expected question and" in done.stderr


def test_the_laptop_trains_a_model_that_reads_generated_questions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    made = [sys.executable, str(EXAMPLE / "generate.py"), "--output", "data/gsm8k-made"]
    subprocess.run(made, check=True, capture_output=True)
    rows = [json.loads(line) for line in open("data/gsm8k-made/train.jsonl")]
    assert len(rows) == 200 and prepare(tmp_path, rows).returncode == 0
    (tmp_path / "out").rename(tmp_path / "data/gsm8k")
    made = ["make-tiny-model", "--output", "runs/gsm8k-tiny", "--chat-template"]
    done = CliRunner().invoke(main, [*made, "--tokenizer-from", "data/gsm8k/train.parquet"])
    assert done.exit_code == 0, done.output
    tokenizer = load_tokenizer(Path("runs/gsm8k-tiny/model"))
    text = rows[0]["question"] + rows[0]["answer"] + " no such word: \u00e9\u4e16"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and len(ids) < 0.6 * len(text)
    config = RunConfig.from_toml(EXAMPLE / "laptop.toml")
    job = preflight(config, 2)
    job.close()
    prompt = job.prompts[0].text
    assert prompt.startswith("<user>") and prompt.endswith("####.<eos><assistant>")
    assert len(job.prompts) == 200
    assert job.tokenizer.decode(job.prompts[0].token_ids) == prompt
    answers = [sample(text) for text in ("12 34", "no", "")]
    assert scored(config.data, *answers) == pytest.approx([0.8, 0.0, 0.0])


def test_a_tokenizer_is_trained_again_for_other_data_alone(tmp_path):
    for name, text in (("a", "one two"), ("b", "three four")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": text}) + "\n")
    make = ["make-tiny-model", "--output", str(tmp_path / "tiny"), "--num-layers", "1"]
    outcomes = []
    for flags in (["a.jsonl"], ["a.jsonl"], ["b.jsonl"], ["a.jsonl", "--vocab-size", "200"]):
        source = [str(tmp_path / flags[0]), *flags[1:]]
        done = CliRunner().invoke(main, [*make, "--tokenizer-from", *source])
        outcomes.append((done.exit_code, done.output.strip().splitlines()[-1]))
    assert [code for code, _ in outcomes] == [0, 0, 2, 2]
    assert outcomes[1][1].endswith("already there") and "tokenizer_from" in outcomes[2][1]
    assert "vocab_size 200 is below the 259 of bytes and special tokens" in outcomes[3][1]
    alone = CliRunner().invoke(main, [*make, "--chat-template"])
    assert alone.exit_code == 2 and "--chat-template needs --tokenizer-from" in alone.output

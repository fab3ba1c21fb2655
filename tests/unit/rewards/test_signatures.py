"""Reward functions that were written for other trainers are called as these call them."""

from __future__ import annotations

import dataclasses
import datetime
import json

import pyarrow.parquet
import pytest

from r3train.config.data_settings import PromptFile
from r3train.data.prompts import load_prompts
from r3train.loop.rollout_file import read_samples, write_samples
from tests.unit.data.test_special_tokens import tokenizer
from r3train.rewards.scoring import Scorer
from tests.unit.rewards.test_scoring import sample, scored, settings


@pytest.mark.parametrize(
    "name, more, reward",
    [
        ("of_verl", {}, 2.0),  # right, and one key of metadata
        ("of_verl_gsm8k", {}, 2.0),
        ("of_verl_with_more", {}, 3.0),
        ("of_trl", {}, 8.0),
        ("of_trl_chat", {"apply_chat_template": True}, 4.0),
        ("of_verifiers", {}, 4.0),
        ("of_verifiers_chat", {"apply_chat_template": True}, 0.0),
        ("of_areal", {}, 10.0),  # right, 2 and 4 tokens, a column
        ("of_swift", {}, 0.0),  # an object of a class
    ],
)
def test_functions_of_other_trainers_get_what_their_parameters_name(name, more, reward):
    assert scored(settings(name, **more), sample("four", metadata={"n": 3})) == [reward]


def test_an_answer_of_verifiers_is_text():
    data = settings("of_verifiers_chat", apply_chat_template=True)
    assert scored(data, sample("36", label=36)) == [1.0]


def test_a_function_of_trl_scores_a_group_too():
    samples = [sample(text, number=i, metadata={"n": i}) for i, text in enumerate(("a", "bcd"))]
    assert scored(settings("of_trl", group_rm=True), *samples, group=True) == [2.0, 5.0]


@pytest.mark.parametrize(
    "name, group, message",
    [
        (
            "of_slime",
            False,
            r"looks like slime's reward: write a function \(sample\), with sample.te",
        ),
        ("of_slime", True, r"looks like slime's reward: write a function \(samples\), with"),
        (
            "of_openrlhf",
            False,
            r"its parameters queries, prompts, labels are .* write a function \(p",
        ),
        ("of_openrlhf", True, r"its parameters .* write a function \(samples\), with prompt.text"),
        (
            "of_response_label",
            False,
            r"its parameters prompt, response, label are those of another trainer: write a function"
            r" \(prompt, response_text, response_ids\), with prompt.text and prompt.label",
        ),
        ("of_correct_answer", False, "its parameters question, text, correct_answer are those of"),
        ("OfSwift", False, "is a class: make an object of it in its module and name that"),
        ("of_verl", True, r"its parameters data_source, .* write a function \(samples\), with"),
    ],
)
def test_what_cannot_be_called_is_refused_with_what_to_write(name, group, message):
    with pytest.raises(ValueError, match=f"^--custom-rm-path .*{name}: {message}"):
        Scorer(settings(name, group_rm=group))


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "of_trl_too_many",
            r"got 1 completion and must return a number for each, got \[1.0, 2.0\]",
        ),
        ("of_trl", "raised TypeError: .*missing 1 required positional argument: 'n'"),
        ("of_verifiers_state", "raised TypeError: .*missing 1 required .* 'state'"),
        ("of_verl_wanting_more", "raised TypeError: .*missing 1 required .* 'tokenizer'"),
    ],
)
def test_a_call_that_fails_names_the_prompt_and_the_function(name, message):
    with pytest.raises(ValueError, match=f"^prompt p.jsonl:7: reward .*:{name} {message}"):
        scored(settings(name), sample("four"))


def read(path, name, tokenizer, content, **more):
    path.write_text(json.dumps(content) + "\n")
    data = settings(name, **more)
    return load_prompts(PromptFile(path), data, tokenizer, (100, "test"))[0], data


def test_a_function_of_verl_gets_the_rows_column_data_source(tmp_path):
    row = {"input": "cat", "label": 1, "data_source": "openai/gsm8k", "extra_info": {"index": 3}}
    more = {"metadata_key": "extra_info"}
    prompt, data = read(tmp_path / "p.jsonl", "of_verl_source", tokenizer(), row, **more)
    assert prompt.metadata == {"index": 3}
    answer = dataclasses.replace(sample("dog"), prompt=prompt)
    assert scored(data, answer) == [1.0]


@pytest.mark.parametrize("content", ["cat", [{"role": "user", "content": "cat"}]])
def test_a_function_of_trl_gets_messages_and_the_rows_columns(content, tmp_path):
    row = {"input": content, "label": 1, "level": "hard"}
    more = {"apply_chat_template": True}
    prompt, data = read(tmp_path / "p.jsonl", "of_trl_prompts", tokenizer(), row, **more)
    answer = dataclasses.replace(sample("dog"), prompt=prompt)
    assert scored(data, answer) == [1.0]


def test_columns_stay_in_files_of_rollouts_and_those_that_json_lacks_are_left_out(tmp_path):
    rows = [{"input": "cat", "label": 1, "level": "hard", "when": datetime.date(2026, 1, 2)}]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = settings("of_trl_prompts")
    [prompt] = load_prompts(PromptFile(path), data, tokenizer(), (100, "test"))
    assert prompt.columns == {"label": 1, "level": "hard"}
    answer = dataclasses.replace(sample("dog"), prompt=prompt)
    write_samples(tmp_path / "r.safetensors", [(answer, 1.0)], {})
    [(kept, _)], _ = read_samples(tmp_path / "r.safetensors")
    assert kept.prompt.columns == prompt.columns

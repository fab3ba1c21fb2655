"""Evaluation sets: what each takes from flags and rollout, when they are due, and what is refused."""

import pytest

from r3train.config import RunConfig
from r3train.config.sources import ConfigError

BASE = {
    "hf_checkpoint": "m",
    "prompt_data": "p.jsonl",
    "num_rollout": 7,
    "rollout_batch_size": 2,
    "rollout_max_response_len": 8,
    "rollout_temperature": 0.9,
    "rollout_top_p": 0.8,
    "rollout_top_k": 40,
    "rm_type": "math",
    "input_key": "question",
}
OF_ROLLOUT = {
    "input_key": "question",
    "label_key": "label",
    "metadata_key": "metadata",
    "apply_chat_template": False,
    "rm_type": None,
    "n_samples_per_eval_prompt": 1,
    "temperature": 0.9,
    "top_p": 0.8,
    "top_k": 40,
    "max_response_len": 8,
}
OF_FLAGS = {
    "input_key": "q",
    "label_key": "a",
    "metadata_key": "metadata",
    "apply_chat_template": False,
    "rm_type": "exact_match",
    "n_samples_per_eval_prompt": 4,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "max_response_len": 16,
}
FLAGS = {
    "eval_input_key": "q",
    "eval_label_key": "a",
    "eval_rm_type": "exact_match",
    "n_samples_per_eval_prompt": 4,
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_top_k": 20,
    "eval_max_response_len": 16,
}
OWN = {
    "input_key": "x",
    "label_key": "y",
    "metadata_key": "z",
    "apply_chat_template": True,
    "rm_type": "accepted_words",
    "n_samples_per_eval_prompt": 2,
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 5,
    "max_response_len": 32,
}


def config(**flags) -> RunConfig:
    return RunConfig.from_sources(flags={**BASE, **flags})


def settings(dataset) -> dict:
    return dataset.model_dump(exclude={"name", "path"})


def test_a_set_takes_its_own_value_then_the_flags_then_the_rollouts():
    sets = {"datasets": [{"name": "own", "path": "o.jsonl", **OWN}, {"name": "b", "path": "b"}]}
    with_flags = config(eval_prompt_data=("gsm8k", "g.parquet"), **FLAGS, **sets).eval_sets
    assert [(d.name, str(d.path)) for d in with_flags] == [
        ("gsm8k", "g.parquet"),
        ("own", "o.jsonl"),
        ("b", "b"),
    ]
    assert [settings(d) for d in with_flags] == [OF_FLAGS, OWN, OF_FLAGS]
    (alone,) = config(eval_prompt_data=("gsm8k", "g.parquet")).eval_sets
    assert settings(alone) == OF_ROLLOUT


def test_a_temperature_of_0_is_a_value_and_not_the_default():
    sets = config(eval_prompt_data=("a", "b"), eval_temperature=0.0).eval_sets
    assert sets[0].temperature == 0.0


@pytest.mark.parametrize(
    ("flags", "due"),
    [
        ({}, [0, 7]),
        ({"eval_interval": 3}, [0, 3, 6, 7]),
        ({"eval_interval": 3, "skip_eval_before_train": True}, [3, 6, 7]),
        ({"eval_interval": 7}, [0, 7]),
    ],
)
def test_evaluation_is_due_at_the_start_every_n_rollouts_and_at_the_end(flags, due):
    asked = config(eval_prompt_data=("a", "b"), **flags)
    assert [version for version in range(8) if asked.eval_due(version)] == due
    assert not any(config().eval_due(version) for version in range(8))


def test_the_resolved_configuration_reads_back(tmp_path):
    made = config(eval_prompt_data=("a", "b"), datasets=[{"name": "own", "path": "o", **OWN}])
    (tmp_path / "c.toml").write_text(made.to_toml())
    assert RunConfig.from_toml(tmp_path / "c.toml") == made


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"eval_prompt_data": ("gsm8k",)}, "--eval-prompt-data: expected a name and a file"),
        ({"eval_prompt_data": ("../a", "b")}, "--eval-prompt-data"),
        ({"datasets": [{"name": "a"}]}, r"datasets\.0\.path: field required"),
        (
            {"datasets": [{"name": "a", "path": "b", "temprature": 1}]},
            r"datasets\.0\.temprature: unknown key temprature\. Did you mean temperature\?",
        ),
        (
            {"datasets": [{"name": "a/b", "path": "b"}]},
            r"datasets\.0\.name: expected letters, digits, _, \. and -, and neither \. nor - first",
        ),
        ({"datasets": [{"name": "a", "path": "b", "top_p": 2}]}, r"datasets\.0\.top_p"),
    ],
)
def test_a_set_that_is_no_set_is_refused_by_its_key(flags, words):
    with pytest.raises(ConfigError, match=words):
        config(**flags)

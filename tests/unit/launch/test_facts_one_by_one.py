"""Facts of a resume: what was done before counts only if each setting is as it was: evaluations, waiting samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from r3train.config import RunConfig
from r3train.config.evaluation_settings import EvalDataset
from r3train.launch.job.checked_job import eval_settings
from r3train.launch.job.resume import sample_facts

BASE = RunConfig.from_sources(
    flags={
        "hf_checkpoint": Path("model"),
        "prompt_data": "p.jsonl",
        "num_rollout": 1,
        "rollout_batch_size": 2,
        "rollout_max_response_len": 8,
        "rm_type": "accepted_words",
        "agent": "package.module:function",
        "reward_keys": ("a", "b=2"),
    }
)
DATASET = EvalDataset(
    name="held_out",
    path=Path("held_out.jsonl"),
    input_key="input",
    label_key="label",
    metadata_key="metadata",
    apply_chat_template=False,
    rm_type="accepted_words",
    n_samples_per_eval_prompt=2,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    max_response_len=8,
)
# what an evaluation's answers and rewards depend on; of the other settings they do not, or a resume refuses another value
DECIDES = {
    "agent": set(type(BASE.agent).model_fields),
    "algorithm": {"reward_keys", "reward_weights"},
    "data": {
        "apply_chat_template_kwargs",
        "custom_rm_path",
        "group_rm",
        "judge_max_tokens",
        "judge_model",
        "judge_pattern",
        "judge_template",
        "judge_url",
        "reward_key",
        "rm_type",
        "rm_url",
        "tool_key",
    },
    "model": {"hf_checkpoint"},
    "rollout": {
        "environment",
        "environment_max_turn_len",
        "environment_max_turns",
        "rollout_max_context_len",
        "rollout_max_prompt_len",
        "rollout_seed",
        "rollout_weights",
    },
}


def other(value: Any, annotation: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        choices = [
            c
            for a in (annotation, *get_args(annotation))
            if get_origin(a) is Literal
            for c in get_args(a)
        ]
        return next((c for c in choices if c != value), value + "x")
    if isinstance(value, Path):
        return Path("another")
    if isinstance(value, tuple):
        return (*value, "x")
    if isinstance(value, dict):
        return {**value, "x": 1}
    return 7 if "int" in str(annotation) or "float" in str(annotation) else "x"


def fingerprint(
    config: RunConfig, dataset: EvalDataset = DATASET, *, stop: int = 1, file="a", code="c"
) -> str:
    """The fingerprint of an evaluation set in a run."""
    prompt_file, reward = SimpleNamespace(sha256=file), SimpleNamespace(code=code)
    data = SimpleNamespace(dataset=dataset, prompt_file=prompt_file, reward=reward)
    job = SimpleNamespace(config=config, stop_token_ids=(stop,), eval_data=[data])
    [found] = eval_settings(job).values()
    return found


def changed(section: BaseModel, name: str) -> BaseModel:
    """A section with another value of one setting, whatever goes with it."""
    value = other(getattr(section, name), type(section).model_fields[name].annotation)
    return section.model_copy(update={name: value})


def deciding(facts: Callable[[RunConfig], Any]) -> dict[str, set[str]]:
    """By section, the settings of which another value gives other facts of a run."""
    found = defaultdict(set)
    for section in RunConfig.model_fields:
        for name in type(getattr(BASE, section)).model_fields:
            other_run = BASE.model_copy(update={section: changed(getattr(BASE, section), name)})
            if facts(other_run) != facts(BASE):
                found[section].add(name)
    return dict(found)


def test_each_setting_that_decides_an_answer_or_its_reward_counts_and_no_other():
    assert deciding(fingerprint) == DECIDES


def facts_of_samples(config: RunConfig, code: str = "c") -> dict[str, Any]:
    """The facts of a run's waiting samples."""
    job = SimpleNamespace(config=config, prompt_file="read", reward=SimpleNamespace(code=code))
    return sample_facts(job)


def test_each_setting_that_decided_a_waiting_sample_or_its_reward_counts_and_no_other():
    rewards = DECIDES["data"] - {"apply_chat_template_kwargs", "tool_key"}
    assert deciding(facts_of_samples) == {
        "agent": {"agent", "agent_failure_reward"},  # agent_command takes the place of agent
        "algorithm": {"reward_keys", "reward_weights"},
        "data": rewards | {"label_key", "metadata_key"},
        "rollout": {"environment"},
    }
    assert facts_of_samples(BASE, "d") != facts_of_samples(BASE)


@pytest.mark.parametrize("name", sorted(EvalDataset.model_fields.keys() - {"path"}))
def test_each_setting_of_the_set_itself_counts(name):
    assert fingerprint(BASE, changed(DATASET, name)) != fingerprint(BASE)


@pytest.mark.parametrize("fact", [{"stop": 2}, {"file": "b"}, {"code": "d"}])
def test_stop_tokens_the_file_and_the_rewards_code_count(fact):
    assert fingerprint(BASE, **fact) != fingerprint(BASE)
    moved = DATASET.model_copy(update={"path": Path("elsewhere") / DATASET.path})
    assert fingerprint(BASE, moved) == fingerprint(BASE)

"""Reward functions that were written for other trainers are called as these call them."""

from __future__ import annotations

import pytest

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
    ],
)
def test_functions_of_verl_and_trl_get_what_their_parameters_name(name, more, reward):
    assert scored(settings(name, **more), sample("four", metadata={"n": 3})) == [reward]


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
        ("of_verl", True, r"found a function \(data_source.*, expected a function \(samples\)"),
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
        ("of_verl_wanting_more", "raised TypeError: .*missing 1 required .* 'tokenizer'"),
    ],
)
def test_a_call_that_fails_names_the_prompt_and_the_function(name, message):
    with pytest.raises(ValueError, match=f"^prompt p.jsonl:7: reward .*:{name} {message}"):
        scored(settings(name), sample("four"))

"""A reward, loss or environment that raises is shown with its own file, line and frames."""

from __future__ import annotations

import json
import traceback

import pytest
from tests.unit.rewards.test_scoring import sample, scored, settings

from r3train.user_code import running_user_code, UserCodeFailed
from r3train.user_frames import place

HERE = __name__.rpartition(".")[2]


def helper(label):
    return label["answer"]


def raises(prompt, text, ids):
    return helper({})


async def raises_async(prompt, text, ids):
    return helper({})


def asks_a_library(prompt, text, ids):
    return json.loads("{")


def line_of(text: str) -> int:
    lines = open(__file__, encoding="utf-8").read().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    "reward, shown, last",
    [
        (raises, "KeyError: 'answer'", 'return label["answer"]'),
        (raises_async, "KeyError: 'answer'", 'return label["answer"]'),
        # the place is the user's line, the frames go on into the library
        (asks_a_library, "JSONDecodeError", 'return json.loads("{")'),
    ],
)
def test_a_reward_that_raises_names_its_line_and_brings_its_frames_and_the_response(
    reward, shown, last
):
    with pytest.raises(ValueError) as caught:
        scored(settings(rm_type=f"{__name__}:{reward.__name__}"), sample())
    assert f"raised {shown}" in str(caught.value)
    assert f"({HERE}.py:{line_of(last)})" in str(caught.value)
    trace = "".join(traceback.format_exception(caught.value))
    assert f"in {reward.__name__}" in trace and last in trace
    assert "rewards/worker.py" not in trace, "the frames begin with the user's"
    assert f"the response of sample {sample().sample_id}: {sample().text!r}" in trace


def test_code_that_fails_in_this_process_names_its_line_and_ours_has_none():
    with pytest.raises(UserCodeFailed, match=rf"^x: raised KeyError: 'answer' \({HERE}\.py:\d+\)$"):
        with running_user_code("x"):
            helper({})
    try:
        with running_user_code("x"):
            int("of a library alone")
    except UserCodeFailed as error:
        assert place(error.__cause__).startswith(f" ({HERE}.py:")

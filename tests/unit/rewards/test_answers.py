"""The answer that is taken of a response: signs, commas, marks, boxes and letters, the last of each."""

from __future__ import annotations

import time

import pytest
from aiohttp import web
from tests.unit.rewards.test_remote import JUDGE, REMOTE, completion, score
from tests.unit.rewards.test_rewards import reward_of
from tests.unit.rewards.test_scoring import sample, settings

from r3train.rewards.answers import final_answer, last_box
from r3train.rewards.code import program_of
from r3train.rewards.scoring import Scorer


@pytest.mark.parametrize(
    "text, box",
    [
        (r"\boxed{1} and \fbox{7}", "7"),
        (r"\boxed{\{1}", r"\{1"),
        (r"\boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
    ],
)
def test_a_box_ends_with_its_own_brace(text, box):
    assert last_box(text) == box


@pytest.mark.parametrize(
    "text, answer",
    [
        ("#### 1\nno:\n#### 72", "72"),
        ("it is 72, as I said", "72"),
        ("so it is -5", "-5"),
        ("so it is 3/4 of it", "3/4"),
        ("first $1$ and then 5", "5"),
        ("first 5 and then $x + 1$ of it", "x + 1"),
        ("so .5", ".5"),
    ],
)
def test_the_final_answer_is_the_last_one_with_its_sign(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "label, response, reward",
    [
        ("-5", "it is -5", 1.0),
        ("-5", "it is 5", 0.0),
        ("1072", r"\boxed{1{,}072}", 1.0),
        ("50%", "it is 50", 1.0),
        ("50", r"so \boxed{50%}", 1.0),
        ("72", "it is 72, as I said", 1.0),
        ("3", "The answer is \u22123.", 0.0),
        ("-3", "The answer is \u22123.", 1.0),
        ("-3", "The answer is \u20133.", 1.0),
        ("20", r"\boxed{20\%}", 1.0),
        ("5", r"\boxed{5\text{ hours}}", 1.0),
        ("5", r"\boxed{5 hours}", 1.0),
        ("5", r"\boxed{\text{5}}", 1.0),
        ("5", r"\boxed{5^\circ}", 1.0),
        ("20", r"\boxed{x = 20}", 1.0),
        ("70000", r"\boxed{70\,000}", 1.0),
        ("70000", r"it is 70\,000", 1.0),
        ("70000", "it is 70~000", 1.0),
        ("70000", "**#### 70000**", 1.0),
        ("70000", r"\boxed{\$70,000.00}", 1.0),
        ("5", r"\boxed{5x}", 0.0),
        ("5", r"\boxed{5\pi}", 0.0),
        ("5", r"\boxed{5 or 6}", 0.0),
        ("5", r"\boxed{\frac{5}{2}}", 0.0),
        ("5 hours", "it is 5", 1.0),
    ],
)
def test_gsm8k_reads_signs_commas_and_percents(label, response, reward):
    assert reward_of("gsm8k", label, response) == reward


@pytest.mark.parametrize(
    "label, response, reward",
    [
        (r"so \boxed{34}", "Answer: 34", 1.0),
        ("$x$", "Answer: x", 1.0),
        ("x", "Answer: $x$.", 1.0),
        ("x", "ANSWER : x", 1.0),
        # the numbers of verl 0.9.1's math_dapo.compute_score
        ("34", "Answer: 34.0", -1.0),
        ("34", "Answer: 34.", -1.0),
        ("34", "Answer: x = 34", 1.0),
        ("34", "Answer: 34 dollars", 1.0),
        ("34", r"Answer: \text{34}", 1.0),
        ("34", r"Answer: 34^\circ", 1.0),
        ("34", "**Answer:** 34", -1.0),
        ("1234", "Answer: 1,234", 1.0),
        (r"\frac{1}{2}", r"Answer: \frac12", 1.0),
        (r"\sqrt{3}", r"Answer: $\boxed{\sqrt3}$", 1.0),
        ("apple", "Answer: an apple", 1.0),
        (34.0, "Answer: 34", 1.0),
    ],
)
def test_dapo_scores_as_verl_does(label, response, reward):
    assert reward_of("dapo", label, response) == reward


@pytest.mark.parametrize(
    "name, label, response, reward",
    [
        ("math", 0.00001, r"\boxed{0.00001}", 1.0),
        ("math", 0.00001, r"\boxed{10^{-5}}", 1.0),
        ("math", 0.00001, r"\boxed{e-5}", 0.0),
        ("math", "1e-05", r"\boxed{0.00001}", 1.0),
        ("math", "1e-05", r"\boxed{e-5}", 0.0),
        ("math", 2.5e-7, r"\boxed{0.00000025}", 1.0),
        ("math", 1e16, r"\boxed{10000000000000000}", 1.0),
        ("math", "6.02e23", r"\boxed{6.02 \times 10^{23}}", 1.0),
        ("math", "0.00001", "it is 1e-5", 1.0),
        ("math", 36.0, r"\boxed{36}", 1.0),
        ("math", "-3", "The answer is \u22123.", 1.0),
        ("math", "3", "The answer is \u22123.", 0.0),
        ("math", "70000", r"\boxed{70\,000}", 1.0),
        ("math", "70000", "it is 70~000", 1.0),
        ("math", "e^{5}", r"\boxed{e^5}", 1.0),
        ("exact_match", 36.0, "36", 1.0),
        ("exact_match", 0.00001, "0.00001", 1.0),
        ("exact_match", "1e-05", "1e-05", 1.0),
        ("f1", [36.0, "x"], "36", 1.0),
        ("gpqa", 2.0, "Answer: C", 1.0),
        ("gsm8k", 1e16, "it is 10,000,000,000,000,000", 1.0),
    ],
)
def test_a_number_is_the_label_that_a_model_writes(name, label, response, reward):
    assert reward_of(name, label, response) == reward


@pytest.mark.parametrize("name", ["gsm8k", "dapo", "exact_match", "gpqa", "f1"])
@pytest.mark.parametrize("filler", ["!", "5,", "\\text{", "~", " ", "7 ", "$", "####", "\\boxed{"])
def test_a_hostile_answer_takes_no_time(name, filler):
    label = "A" if name == "gpqa" else "5"
    for text in (f"{filler * 4000}x", f"\\boxed{{5 {filler * 1990}x7}}", f"5{filler * 4000}7"):
        began = time.process_time()
        reward_of(name, label, text)
        assert time.process_time() - began < 1.0, text[:20]


@pytest.mark.parametrize("name", ["exact_match", "f1", "math", "gsm8k", "dapo", "gpqa"])
@pytest.mark.parametrize("label", [True, float("nan"), float("inf")])
def test_a_label_that_is_no_text_and_no_number_is_refused(name, label):
    with pytest.raises(ValueError, match=f"prompt p.jsonl:7: {name} needs a label .*, got "):
        Scorer(settings(rm_type=name)).check([sample(label=label).prompt])


@pytest.mark.parametrize(
    "label, response, metadata, reward",
    [
        ("B", "The answer is A. No: the answer is B.", None, 1.0),
        ("A", "The answer is A. No: the answer is B.", None, 0.0),
        ("B", "between A and B", None, 1.0),
        ("b", "Answer: B", None, 1.0),
        ("green", "Answer: B", {"choices": {"A": "red", "B": "green"}}, 1.0),
        (0, "Answer: A", None, 1.0),
        ("B", "Answer: B. Then K and Z", None, 1.0),
    ],
)
def test_gpqa_takes_the_last_letter_that_was_stated(label, response, metadata, reward):
    assert reward_of("gpqa", label, response, metadata) == reward


@pytest.mark.parametrize("label", ["K", 10, -1, True, "AB"])
def test_gpqa_without_choices_has_ten_letters(label):
    with pytest.raises(ValueError, match="a label that is one of A to J, a number below 10"):
        reward_of("gpqa", label, "Answer: A")


def test_f1_of_nothing_against_nothing_is_1_and_the_best_label_counts():
    assert reward_of("f1", "the", "a") == 1.0
    assert reward_of("f1", ["a blue cow", "cat", "dog house"], "dog") == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["gsm8k", "boxed_gsm8k", "boxed_exact_match"])
def test_a_reward_of_the_box_needs_the_label_of_the_reward(name):
    with pytest.raises(ValueError, match=f"{name} needs a label, and key label is missing"):
        Scorer(settings(rm_type=name)).check([sample(label=None).prompt])


@pytest.mark.parametrize("language", ["", "python", "py"])
def test_a_block_of_python_has_several_names(language):
    assert program_of(f"```{language}\na\n```\n```{language}\nb\n```\n```sh\nc\n```") == "b\n"


async def test_a_server_that_takes_too_long_to_read_is_asked_again():
    statuses = iter([408, 500])

    async def handler(request):
        return web.json_response(1.0, status=next(statuses, 200))

    assert await score(handler, sample(), **REMOTE) == [1.0]
    assert next(statuses, None) is None


async def test_json_of_any_content_type_is_an_answer():
    async def handler(request):
        return web.Response(text="0.5", content_type="text/plain")

    assert await score(handler, sample(), **REMOTE) == [0.5]


async def test_a_judge_is_bounded_and_gets_the_label_as_text():
    handler = completion("Score: 1")
    template = "L {label} R {response}"
    settings_of_judge = JUDGE | {"judge_max_tokens": 33, "judge_template": template}
    assert await score(handler, sample("r", label="yes"), **settings_of_judge) == [1.0]
    ((_, _, body),) = handler.asked
    assert body["max_tokens"] == 33
    assert body["messages"][0]["content"] == "L yes R r"

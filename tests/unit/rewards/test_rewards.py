"""Rewards: what an answer is worth, and what is refused with the prompt's name."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from tests.unit.reward_functions import PATH
from tests.unit.rewards.test_scoring import sample, scored, settings

from r3train.rewards.scoring import Scorer


def reward_of(rm_type, label, response, metadata=None) -> float:
    (reward,) = scored(settings(rm_type=rm_type), sample(response, label=label, metadata=metadata))
    return reward


ANIMALS = ["cat", "dog"]


@pytest.mark.parametrize(
    "label, response, metadata, reward",
    [
        (ANIMALS, "cat dog cat dog", {"num_words": 4}, 1.0),
        (ANIMALS, "cat apple dog saw", {"num_words": 4}, 0.5),
        ("cat dog", "cat apple", None, 0.5),
        (ANIMALS, "cat", {"num_words": 4}, 0.25),  # a short answer is measured by what was asked
        (ANIMALS, "cat dog cat dog apple apple apple apple", {"num_words": 4}, 0.5),
        (ANIMALS, "", None, 0.0),
        (ANIMALS, "cats", None, 0.0),
        (ANIMALS, " cat\n dog ", None, 1.0),
    ],
)
def test_accepted_words_is_the_share_of_right_words(label, response, metadata, reward):
    assert reward_of("accepted_words", label, response, metadata) == reward


@pytest.mark.parametrize(
    "label, metadata",
    [
        (7, {}),
        ([], {}),
        ("", {}),
        ([1], {}),
        ("cat", {"num_words": "8"}),
        ("cat", {"num_words": -1}),
    ],
)
def test_accepted_words_names_the_prompt_of_a_bad_label(label, metadata):
    with pytest.raises(ValueError, match="prompt p.jsonl:7"):
        reward_of("accepted_words", label, "cat", metadata)


def test_exact_match_compares_text_without_outer_space():
    assert reward_of("exact_match", "a b", " a b\n") == 1.0
    assert reward_of("exact_match", "a b", "a  b") == 0.0
    assert reward_of("exact_match", 42, "42") == 1.0
    with pytest.raises(ValueError, match="prompt p.jsonl:7: exact_match needs a label of text"):
        reward_of("exact_match", ["a"], "a")


@pytest.mark.parametrize(
    "label, response, reward",
    [
        ("42", r"The answer is \boxed{42}.", 1.0),
        (42, "so it is 42", 1.0),
        (42, "so it is 42.", 1.0),
        ("42", r"\boxed{41}", 0.0),
        ("42", "no idea", 0.0),
        ("42", "", 0.0),
        # the last box, else ####, else the last number
        ("72", r"\boxed{71} then \boxed{72}", 1.0),
        ("71", r"\boxed{71} then \boxed{72}", 0.0),
        ("72", "#### 72\nAnd 3 more words", 1.0),
        ("72", r"\boxed{72} and then #### 5", 1.0),
        ("72", "there are 72 of them, or 71", 0.0),
        ("71", "there are 72 of them, or 71", 1.0),
        # an answer that was cut off inside its box is no answer
        ("72", r"first 72, so \boxed{7", 0.0),
        ("72", "72 " + "so it goes on " * 400 + "to the end", 0.0),
        ("1,234", "1234", 1.0),
        (r"\$12.50", "12.5", 1.0),
        # a whole solution as label
        ("first 3 and 4.\n#### 7", "it is 7", 1.0),
        (r"we find \boxed{\frac{1}{2}}", r"$\frac{2}{4}$", 1.0),
    ],
)
def test_math_reads_the_last_box_else_the_mark_else_the_last_number(label, response, reward):
    assert reward_of("math", label, response) == reward


def test_math_compares_by_value():
    pairs = [
        ("1/2", r"$\frac{1}{2}$", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"$x^2 + 1$", r"\boxed{1 + x^2}", 1.0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        (r"\text{even}", r"\boxed{even}", 1.0),
        ("10%", r"\boxed{0.1}", 1.0),
        ("(1, 2)", r"\boxed{(2, 1)}", 0.0),
        ("7", r"\boxed{\infty}", 0.0),
    ]
    samples = [sample(response, label=label) for label, response, _ in pairs]
    assert scored(settings(rm_type="math"), *samples) == [reward for _, _, reward in pairs]


def test_hostile_expressions_score_0_beside_the_others_and_end_their_process():
    hostile = [sample(r"\boxed{9^{9^{9^{9}}}}", label="x", number=n) for n in range(3)]
    good = [sample(r"\boxed{\frac{4}{2}}", label="2", number=n) for n in range(20)]
    data = settings(rm_type="math", reward_timeout_s=10.0)
    assert scored(data, *hostile, *good) == [0.0] * 3 + [1.0] * 20


def graders():
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "r3train.rewards.worker" in " ".join(process.cmdline())
    ]


async def test_a_grader_that_gets_no_cpu_for_a_while_scores_the_right_answer_1(caplog):
    scorer = Scorer(settings(rm_type="math"))
    answer = sample(r"\boxed{\frac{2}{4}}", label="1/2")
    try:
        assert await scorer(answer) == 1.0
        for process in graders():
            process.suspend()
        asyncio.get_running_loop().call_later(4.0, lambda: [each.resume() for each in graders()])
        assert await scorer(answer) == 1.0
        for process in graders():
            process.kill()
        assert await scorer(answer) == 1.0
        assert caplog.text == ""
        assert await scorer(sample(r"\boxed{9^{9^{9^{9}}}}", label="1/2")) == 0.0
    finally:
        scorer.close()
    assert "SIGXCPU" in caplog.text and "scores 0, as 1 so far" in caplog.text


@pytest.mark.parametrize("label", ["", ["4"], True])
def test_math_names_the_prompt_of_a_bad_label(label):
    with pytest.raises(ValueError, match="prompt p.jsonl:7"):
        Scorer(settings(rm_type="math")).check([sample(label=label).prompt])


def test_closing_math_ends_its_process():
    scorer = Scorer(settings(rm_type="math"))

    async def score():
        await scorer(sample(r"\boxed{x + 1}", label="x+1"))
        return graders()

    assert asyncio.run(score())
    scorer.close()
    assert not graders()


@pytest.mark.parametrize("name", ["math", "code", PATH + "half"])
def test_a_scorer_that_was_closed_scores_in_another_loop_however_many_wait(name):
    scorer = Scorer(settings(rm_type=name, reward_concurrency=2))
    text = "```python\nx = 1\n```\n\\boxed{\\frac{2}{4}}"
    label = "assert x == 1" if name == "code" else "1/2"
    answers = [sample(text, label=label, number=number) for number in range(6)]
    for _ in range(2):
        try:
            rewards = asyncio.run(scorer.group(answers))
        finally:
            scorer.close()
        assert set(rewards) == {0.5 if ":" in name else 1.0}


@pytest.mark.parametrize(
    "label, response, reward",
    [
        (72, "so #### 72", 1.0),
        ("48/2 = 24\n#### 72", r"\boxed{72}", 1.0),
        ("72", "the answer is $72.00.", 1.0),
        ("1,072", "1072", 1.0),
        ("72", "#### seventy-two", 0.0),
        ("72", r"\boxed{\frac{144}{2}}", 0.0),
        ("72", "", 0.0),
    ],
)
def test_gsm8k_compares_numbers_alone(label, response, reward):
    assert reward_of("gsm8k", label, response) == reward


def test_gsm8k_refuses_a_label_without_a_number():
    with pytest.raises(ValueError, match="p.jsonl:7: gsm8k needs a label that is a number"):
        Scorer(settings(rm_type="gsm8k")).check([sample(label="Paris").prompt])


@pytest.mark.parametrize(
    "label, response, reward",
    [
        ("34", "Answer: 34", 1.0),
        ("34", "Answer: 33\nno: answer: $34$.", 1.0),
        ("34", r"Answer: \boxed{34}", 1.0),
        ("34", r"\boxed{34}", 1.0),  # without a line of Answer, as verl's
        ("34", r"\boxed{34.0}", -1.0),
        ("34", r"Answer: 3, no: \boxed{34}", -1.0),
        ("34", "Answer: 34" + " and so on" * 100, -1.0),
        ("x + 1", "Answer: x+1", 1.0),
        ("34", "", -1.0),
    ],
)
def test_dapo_reads_the_last_line_of_answer_and_gives_1_or_minus_1(label, response, reward):
    assert reward_of("dapo", label, response) == reward


@pytest.mark.parametrize(
    "label, response, metadata, reward",
    [
        ("B", "The answer is (B).", None, 1.0),
        ("B", "A is wrong, C too. Answer: B", None, 1.0),
        ("B", r"\boxed{B}", None, 1.0),
        ("B", r"answer A, no: \boxed{C}", None, 0.0),
        ("B", "<think>the answer is A</think> B", None, 1.0),
        ("B", "nothing", None, 0.0),
        (1, "Answer: B", {"choices": ["red", "green"]}, 1.0),
        ("green", "Answer: B", {"choices": ["red", "green"]}, 1.0),
        ("B", "Answer: E", {"choices": ["red", "green"]}, 0.0),
    ],
)
def test_gpqa_takes_the_letter_that_was_chosen(label, response, metadata, reward):
    assert reward_of("gpqa", label, response, metadata) == reward


def test_gpqa_names_the_prompt_of_a_label_that_is_no_choice():
    with pytest.raises(ValueError, match="p.jsonl:7: gpqa needs a label that is one of A to B"):
        row = sample(label="blue", metadata={"choices": ["red", "green"]}).prompt
        Scorer(settings(rm_type="gpqa")).check([row])


@pytest.mark.parametrize(
    "label, response, reward",
    [
        ("the red house", "A red house!", 1.0),
        ("red house", "a red car", 0.5),
        (["blue", "red car"], "the red car", 1.0),
        ("red", "blue", 0.0),
        ("red", "", 0.0),
        # punctuation is deleted, not a space: as the official script counts them
        ("US", "U.S.", 1.0),
        ("1000", "1,000", 1.0),
        ("J.K. Rowling", "JK Rowling", 1.0),
        ("don't know", "dont know", 1.0),
        ("Obama's", "Obama s", 0.0),
        ("a.b", "b", 0.0),
    ],
)
def test_f1_counts_shared_words_as_squad_does(label, response, reward):
    assert reward_of("f1", label, response) == reward


def test_boxed_scores_the_last_box_alone():
    assert reward_of("boxed_exact_match", "yes", r"no \boxed{no} \boxed{yes} no") == 1.0
    assert reward_of("boxed_exact_match", "yes", "yes") == 0.0
    assert reward_of("boxed_gsm8k", 7, r"\boxed{7} 8") == 1.0
    assert reward_of("boxed_f1", "red house", r"\boxed{a red house}") == 1.0
    with pytest.raises(ValueError, match="--rm-type nothing: unknown"):
        Scorer(settings(rm_type="boxed_nothing"))

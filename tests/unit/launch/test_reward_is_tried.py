"""The reward is tried on rows of the data before a server starts, and shown; a bad one is refused there."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.launch.test_preflight import start, words
from tests.unit.reward_functions import PATH

LABELLED = {
    "the demo's": (["apple", "pear"], ["--rm-type", "accepted_words"], "1.0 for its label, 0.0"),
    "text": ("pear", ["--rm-type", "exact_match"], "1.0 for its label, 0.0"),
    "a number": (72, ["--custom-rm-path", f"{PATH}of_text"], "2.0 for its label, 0.0"),
    "a table": ({"a": 1}, ["--custom-rm-path", f"{PATH}of_text"], "0.0"),
    "none": (None, ["--custom-rm-path", f"{PATH}number"], "1.0"),  # one token: the end
    "a group": (
        "pear",
        ["--custom-rm-path", f"{PATH}ranks", "--group-rm"],
        "3.0 for its label, 0.0",
    ),
}


@pytest.mark.parametrize("case", LABELLED)
def test_the_reward_of_the_first_prompt_is_shown(case, tiny, tmp_path):
    label, flags, rewards = LABELLED[case]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"input": "cat", "label": label}) + "\n")
    flags += ["--label-key", "label", "--n-samples-per-prompt", "4"]
    result = start(tiny, "--dry-run", "--prompt-data", str(prompts), *flags)
    assert result.exit_code == 0, result.output
    assert f"# reward of the first prompt: {rewards} for no answer\n" in result.output


@pytest.mark.parametrize(
    "name, message, flags",
    [
        ("fails", "raised KeyError: 'gold' (reward_functions.py:", ()),
        ("nothing", "must be a finite number, got None (sample 0)", ()),
        ("nan", "must be a finite number, got nan", ()),
        ("text", "must be a finite number, got '1.0' (sample 0)", ()),
        ("tables", "returned a table, and --reward-key is not set: {", ()),
        ("of_trl_too_many", "got 1 completion and must return a number for each", ()),
        ("hangs_async", "took longer than reward_timeout_s 1 (sample 0)", ("1",)),
    ],
)
def test_a_reward_that_misbehaves_is_refused_in_one_line_with_its_file(name, message, flags, tiny):
    limit = [part for value in flags for part in ("--reward-timeout-s", value)]
    result = start(tiny, "--dry-run", "--custom-rm-path", PATH + name, *limit)
    assert result.exit_code == 2
    said = words(result)
    assert re.search(
        rf"prompt prompts.jsonl:1: reward {PATH}{name} {re.escape(message)}", said
    ), said
    assert re.search(r" \(tests/unit/reward_functions\.py:\d+\)", said), said
    assert said.count("prompt prompts.jsonl:1") == 1


def test_a_reward_that_a_server_computes_is_not_tried(tiny):
    flags = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/rm")
    result = start(tiny, "--dry-run", *flags)
    assert result.exit_code == 0 and "reward of the first prompt" not in result.output


GOOD = {
    "exact_match": ["red", "blue"],
    "gpqa": [2, "A"],
    "dapo": ["34", "x + 1"],
    "math": ["1/2", 36.0],
}
GOOD |= {"boxed_gsm8k": [7, "6 + 2\n#### 8"], "f1": [["red", "a car"], "blue"], "gsm8k": [0, 0]}
GOOD |= {f"{PATH}wants_a_box": ["red", "blue"], f"{PATH}of_text": [72, 8]}


def tried(tiny, tmp_path, name, labels, *flags):
    """The dry run on rows of these labels with a reward."""
    prompts = tmp_path / "p.jsonl"
    rows = ({"input": "cat", "label": label} for label in labels)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags += ("--prompt-data", str(prompts), "--label-key", "label", "--rm-type", name)
    return start(tiny, "--dry-run", *flags)


@pytest.mark.parametrize("name", GOOD)
def test_labels_that_an_answer_can_reach_are_passed_without_a_warning(name, tiny, tmp_path):
    result = tried(tiny, tmp_path, name, GOOD[name])
    assert result.exit_code == 0 and "scores no more than" not in result.output, result.output


@pytest.mark.parametrize(
    "name, labels, message",
    [
        ("exact_match", ["red"] * 900 + [" "], "1 of 901 rows tried: .* (p.jsonl:901; of the"),
        (
            "f1",
            ["red", "A", "the", "an"],
            "3 of 4 rows tried: .* (p.jsonl:2, p.jsonl:3, p.jsonl:4;",
        ),
        ("f1", ["a"] * 5, "p.jsonl:1, p.jsonl:2, p.jsonl:3 and more; of the first, 'a', 1 and 1)"),
        (
            f"{PATH}half",
            ["red", "blue"],
            "2 of 2 rows tried: the label scores no more than an empty",
        ),
        (f"{PATH}first_word", ["red", "blue"], "2 of 2 .* no more than another row's label (p.j"),
    ],
)
def test_labels_that_an_empty_or_a_wrong_answer_satisfies_are_a_warning_that_names_rows(
    name, labels, message, tiny, tmp_path
):
    result = tried(tiny, tmp_path, name, labels)
    assert result.exit_code == 0, result.output
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), words(result)), words(result)


def test_the_labels_of_an_evaluation_set_are_tried_too(tiny, tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"input": "cat", "label": ""}) + "\n")
    flags = ("--eval-prompt-data", "words", str(path), "--eval-interval", "1")
    result = tried(tiny, tmp_path, "exact_match", ["red"], *flags)
    assert "evaluation set words: 1 of 1 rows tried: the label scores no more" in words(result)


@pytest.mark.parametrize(
    "label, message",
    [
        ("# no tests", "p.jsonl:2: code: the label runs no test"),
        ("assert True", "p.jsonl:2: code: an empty program passes the tests"),
        ("{'inputs': ['1'], 'outputs': ['']}", "p.jsonl:2: code needs an output that is not"),
    ],
)
def test_tests_that_an_empty_program_passes_are_refused(label, message, tiny, tmp_path):
    result = tried(tiny, tmp_path, "code", ["assert f(1) == 2", label])
    assert result.exit_code == 2 and message in words(result), words(result)


@pytest.mark.parametrize(
    "label, message",
    [
        ("a\ud800", "p.jsonl:2: key label: character 2 is '\\ud800', half of a surrogate pair"),
        (True, "p.jsonl:2: exact_match needs a label of text or a number, got True"),
        (float("nan"), "p.jsonl:2: exact_match needs a label, and key label is missing or null"),
    ],
)
def test_a_label_that_is_none_is_refused_with_file_and_row(label, message, tiny, tmp_path):
    result = tried(tiny, tmp_path, "exact_match", ["red", label])
    assert result.exit_code == 2 and message in words(result), words(result)

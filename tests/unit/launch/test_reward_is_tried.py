"""The reward is tried on the first prompt before a server starts, and shown; a bad one is refused there."""

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

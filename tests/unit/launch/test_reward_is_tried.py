"""The reward is tried on rows of the data before a server starts, and shown; a bad one is refused there."""

from __future__ import annotations

import json

import pytest

from tests.unit.launch.test_preflight import start
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


def test_a_reward_that_a_server_computes_is_not_tried(tiny):
    flags = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/rm")
    result = start(tiny, "--dry-run", *flags)
    assert result.exit_code == 0 and "reward of the first prompt" not in result.output

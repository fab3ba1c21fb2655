"""The commands of docs/guide/data_and_rewards.md that train a model with a tool, from its conversations to R3's verdict."""

from __future__ import annotations

import json
import re

import pytest

from r3train.observe.metrics import read_metrics
from tests.e2e import checkouts, docs_commands, jobs
from tests.e2e.test_docs_commands import run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(600)]
PAGE = jobs.ROOT / "docs/guide/data_and_rewards.md"
EPISODE = re.compile(
    r'<tool_call>\{"name": "search", "arguments": \{"query": "\w+"\}\}</tool_call><eos>'
    r"<tool>(\w+) [\w ]+\.<eos><assistant>\\boxed\{\1\}"
)


def test_the_laptops_model_calls_the_tool_and_boxes_what_it_has_read(tmp_path):
    checkout = checkouts.linked(tmp_path)
    commands = docs_commands.commands(PAGE.read_text(encoding="utf-8"))
    *made, train = (c for c in commands if "runs/tools-" in c or "tools/laptop" in c)
    assert len(made) == 2
    for command in made:
        run(command, checkout, timeout=240)
    run(f"{train} --num-rollout 3 --run-dir runs/tools", checkout, timeout=300)
    steps = read_metrics(checkout / "runs/tools")
    assert [m["r3/passed"] for m in steps] == [True] * 3
    assert steps[0]["train/log_prob_gap_max"] <= 1e-4
    assert steps[0]["rollout/turns_mean"] > 1.5 and steps[0]["rollout/reward_mean"] > 0.3
    shown = (checkout / "runs/tools/samples.jsonl").read_text().splitlines()
    right = [row for row in map(json.loads, shown) if row["reward"] == 1.0]
    assert any(EPISODE.fullmatch(row["text"]) for row in right), right

"""The laptop's commands of docs/start/first_run.md: from questions made here to an evaluation's curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyarrow import parquet
from tests.browser import chromium
from tests.debian_packages import installed
from tests.e2e import checkouts, docs_commands, jobs
from tests.e2e.test_docs_commands import run
from tests.unit.observe.test_sinks import history, offline_runs, records

from r3train.cli import main
from r3train.observe.metrics import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(600)]
PAGE = jobs.ROOT / "docs/start/first_run.md"
SHORT = "--num-rollout 4 --eval-interval 2 --use-wandb --wandb-mode offline --run-dir runs/laptop"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory) -> Path:
    """The run directory of four rollouts."""
    checkout = checkouts.linked(tmp_path_factory.mktemp("checkout"))
    commands = docs_commands.commands(PAGE.read_text(encoding="utf-8"))
    *made, train = (c for c in commands if "gsm8k-" in c or "gsm8k/laptop" in c)
    for command in made:
        run(command, checkout)
    (message,) = parquet.read_table(checkout / "data/gsm8k/train.parquet")["input"][0].as_py()
    assert message["role"] == "user" and message["content"].endswith("after ####.")
    run(f"{train} {SHORT}", checkout, timeout=480)
    return checkout / "runs/laptop"


def test_the_laptops_commands_train_with_r3_proved_and_evaluate(laptop):
    steps = read_metrics(laptop)
    assert [m["r3/passed"] for m in steps] == [True] * 4
    assert steps[0]["train/log_prob_gap_max"] <= 1e-4
    judged = CliRunner().invoke(main, ["check-evidence", str(laptop)])
    assert judged.exit_code == 0 and "passed: 4 steps" in judged.output, judged.output
    lines = (laptop / "eval/metrics.jsonl").read_text().splitlines()
    curve = {m["step"]: m["eval/gsm8k_test/mean"] for m in map(json.loads, lines)}
    assert sorted(curve) == [0, 2, 4]
    (offline,) = offline_runs(laptop)
    rows = history(records(offline))
    key = "eval/gsm8k_test/mean"
    assert {row["step"]: row[key] for row in rows if key in row} == curve
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert rewards == [m["rollout/reward_mean"] for m in steps]


async def test_the_laptops_report_is_a_page_of_a_browser_with_the_curve(laptop, tmp_path):
    program = installed("chromium", "chromium", "fonts-dejavu-core")
    if program is None:
        pytest.skip("not run: no Chromium, and it cannot be installed here (Debian, as root)")
    assert CliRunner().invoke(main, ["report", str(laptop)]).exit_code == 0
    async with chromium.browser(program, tmp_path / "profile") as devtools:
        seen = await chromium.look(devtools, laptop / "report.html", 1280)
    assert seen.complaints == [] and seen.requests == [] and seen.wide == [] and seen.cut == []
    for words in ("Evaluation: gsm8k_test", "passed: 4 steps", "Highest reward, step"):
        assert words in seen.text
    (tmp_path / "report.png").write_bytes(seen.screenshot)
    assert len(seen.screenshot) > 50_000

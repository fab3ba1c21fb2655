"""The agent of docs/agents.md, by the page's own commands: a tiny model learns to call a tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.e2e import jobs
from tests.e2e.docs_commands import commands

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, CUSTODY

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_the_agent_of_the_page_learns_with_every_verdict_passed(tmp_path):
    page = (jobs.ROOT / "docs/agents.md").read_text(encoding="utf-8")
    made = [command for command in commands(page) if "agents-tiny" in command]
    (train,) = (command for command in commands(page) if "--agent with_openai:run" in command)
    (tmp_path / "examples").symlink_to(jobs.ROOT / "examples")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = jobs.environment() | {"PATH": path}
    for command in (*made, f"{train} --r3-audit-share 0.1 --run-dir runs/agents"):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stdout
    run_dir = tmp_path / "runs/agents"
    rewards = [
        json.loads(line)["rollout/reward_mean"]
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-5:]) / 5 > 0.9, rewards
    audit = audit_run(run_dir)
    assert audit.claims == dict.fromkeys((*CLAIMS, CUSTODY), "passed"), audit.findings

"""The agent of docs/guide/agents.md, by the page's own commands: a tiny model learns to call a tool, disturbed on the way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import psutil
import pytest
from tests.e2e import jobs
from tests.e2e.docs_commands import commands
from tests.e2e.live_jobs import end, scheduler, steps_done, wait_for

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, CUSTODY, SERVED

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

KILLED_AFTER = 20  # steps, of 60
# Sessions see updates.  The pool holds half of 40 calls' tokens, and its server counts on one more token of each.
DISTURBED = (
    "--r3-recheck-share 0.1 --run-dir runs/agents --pause-generation-mode in_place --max-engine-restarts 1"
    " --rollout-max-concurrency 40 --agent-max-sessions 128"
    " --sglang-max-total-tokens 260 --sglang-schedule-conservativeness 0.01"
)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_agent_of_the_page_learns_through_updates_retractions_and_a_killed_server(
    seed, tmp_path
):
    """Every seed is another model, another order of prompts and other samples."""
    page = (jobs.ROOT / "docs/guide/agents.md").read_text(encoding="utf-8")
    make, prepare = (command for command in commands(page) if "agents-tiny" in command)
    (train,) = (command for command in commands(page) if "--agent with_openai:run" in command)
    (tmp_path / "examples").symlink_to(jobs.ROOT / "examples")
    environment = jobs.environment() | {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1",
    }
    for command in (f"{make} --seed {seed}", prepare):
        subprocess.run(shlex.split(command), cwd=tmp_path, env=environment, check=True)
    run_dir, output = tmp_path / "runs/agents", tmp_path / "runs/agents.txt"
    with output.open("w") as out:
        job = psutil.Popen(
            ["bash", "-c", f"exec env {train} {DISTURBED} --rollout-seed {seed} --seed {seed}"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: steps_done(run_dir) >= KILLED_AFTER, job, run_dir, timeout=1200)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=1200) == 0, output.read_text()
    finally:
        end([*(job.children(recursive=True) if job.is_running() else ()), job])
        job.wait()
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [m["rollout/reward_mean"] for m in metrics]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    disturbed = {
        "answers retracted": sum(m["rollout/retracted"] for m in metrics),
        "samples of several versions": sum(m["rollout/spanning_samples"] for m in metrics),
        "servers restarted": metrics[-1]["faults/engine_restarts"],
    }
    audit = audit_run(run_dir)
    sessions, calls = trained_sessions(run_dir)
    print(f"seed {seed}: reward {first:.2f} -> {last:.2f}, {disturbed}, {audit.claims}")
    print(f"steps {len(metrics)}, sessions {sessions}, calls {calls}, recheck {audit.numbers}")
    assert len(metrics) == 60 and first < 0.3 and last > 0.9, rewards
    assert all(disturbed.values()), disturbed
    assert audit.claims == dict.fromkeys((*CLAIMS, SERVED, CUSTODY), "passed"), audit.findings


def trained_sessions(run_dir: Path) -> tuple[int, int]:
    """The sessions of the run and their calls; each has an id of its own."""
    lines = (run_dir / "sessions.jsonl").read_text().splitlines()
    sessions = [json.loads(line) for line in lines]
    ids = sorted(session["sample_id"] for session in sessions)
    assert all(len(list(same)) == 1 for _, same in groupby(ids)), "a session's id came twice"
    return len(sessions), sum(session["calls"] for session in sessions)

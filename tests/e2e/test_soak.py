"""The soak, shortened: faults at given steps, nothing lost and nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.e2e import jobs

pytestmark = pytest.mark.e2e


def soak(*flags: str) -> str:
    """Run a soak, which must pass; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", *flags],
        cwd=jobs.ROOT,
        env=jobs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
    )
    print(done.stdout)  # what each kind of process held, with pytest -rP
    assert done.returncode == 0, done.stdout
    assert "soak passed" in done.stdout and "4 faults injected" in done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_short_soak_loses_nothing_and_leaves_nothing_behind():
    said = soak("--steps", "22", "--fault-every", "4")
    for fault in ("kill_engine", "hang_engine", "kill_rank", "stop_job"):
        assert fault in said


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1500)
def test_20_steps_of_a_users_run_with_four_planned_faults_lose_nothing(tmp_path, tiny_flags):
    """A recipe's own flags: its server is killed, an answer spoiled, requests retracted, a rank killed."""
    plan = "drop_rows@1,retract@3,kill_engine@5,kill_rank@9"
    flags = [
        *tiny_flags,
        *jobs.R3_FLAGS,
        *"--config configs/tiny_cpu.toml --save-interval 5".split(),
    ]
    flags += ["--rollout-segment-len", "3", "--engine-restart-backoff-s", "0"]
    said = soak(
        "--steps", "20", "--chaos", plan, "--directory", str(tmp_path / "soak"), "--", *flags
    )
    assert all(planned.partition("@")[0] in said for planned in plan.split(","))
    # torchrun's restart went on from a checkpoint
    said = (tmp_path / "soak/out.txt").read_text()
    resumed = re.findall(r"resuming from .*?at\s+rollout\s+(\d+)", said, re.DOTALL)
    assert resumed and int(resumed[-1]) in (5, 10, 15), resumed
    metrics = jobs.Job(0, "", tmp_path / "soak/run").metrics()
    assert {m["step"] for m in metrics} == set(range(20))
    assert all(m["r3/passed"] and m["rollout/staleness_max"] <= 1 for m in metrics)

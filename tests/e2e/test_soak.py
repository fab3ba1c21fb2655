"""The soak, shortened: one fault of each kind, nothing lost and nothing left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


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


@pytest.mark.timeout(1500)
def test_a_short_soak_loses_nothing_and_leaves_nothing_behind():
    said = soak("--steps", "22", "--fault-every", "4")
    for fault in ("kill_engine", "hang_engine", "kill_rank", "stop_job"):
        assert fault in said


@pytest.mark.timeout(1500)
def test_20_steps_with_four_planned_faults_lose_nothing():
    plan = "kill_engine@4,drop_rows@8,retract@11,full_disk@13"
    said = soak("--steps", "20", "--chaos", plan)
    for fault in ("kill_engine", "drop_rows", "retract", "full_disk"):
        assert fault in said

"""The soak, shortened: one fault of each kind, nothing lost and nothing left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(1500)
def test_a_short_soak_loses_nothing_and_leaves_nothing_behind():
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--steps", "22", "--fault-every", "4"],
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
    for fault in ("kill_server", "hang_server", "kill_rank", "stop_job"):
        assert fault in done.stdout

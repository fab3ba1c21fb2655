"""A rank of a large job stays far below the usual limit of 1,024 open files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, dict[str, int]]:
    report = tmp_path_factory.mktemp("groups") / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.groups", str(report)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def test_a_rank_of_512_has_one_gloo_group_and_few_of_the_device(counted):
    """With gloo in every group the count finds too many sockets: it finds what it is there to find."""
    found = counted["as made"]
    assert found["sockets"] == 511  # of the group of the host's messages alone
    assert found["of rank 0"] <= 18
    assert found["calls"] <= 2606
    assert counted["gloo everywhere"]["sockets"] > 1900

"""A rank of a large job stays far below the usual limit of 1,024 open files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def counted(directory: Path, *words: str) -> dict[str, int]:
    report = directory / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.groups", str(report), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def test_a_rank_of_512_has_one_gloo_group_and_few_of_the_device(tmp_path):
    found = counted(tmp_path)
    assert found["sockets"] == 511  # of the group of the host's messages alone
    assert found["of rank 0"] <= 17
    assert found["calls"] <= 1574


def test_with_gloo_in_every_group_the_count_finds_too_many_sockets(tmp_path):
    """It finds what it is there to find."""
    assert counted(tmp_path, "gloo-everywhere")["sockets"] > 1900

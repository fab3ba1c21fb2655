"""Every benchmark, few rounds each, as ``make bench`` runs them: do they still run at all?

Nothing is measured here; figures want a machine with nothing else to do.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.run_all import BENCHMARKS
from tests.e2e import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_benchmark_runs_and_has_its_rows_in_the_table(tmp_path):
    with_trl = (jobs.ROOT / ".venv-trl").is_dir()  # make bench-venv
    names = [name for name in BENCHMARKS if with_trl or name != "against_trl"]
    command = [sys.executable, "-m", "benchmarks.run_all", "--quick", "--directory", str(tmp_path)]
    run = subprocess.run(
        [*command, "--only", *names],
        cwd=jobs.ROOT,
        env=jobs.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    results = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert [name for name, result in results.items() if "error" in result] == []
    assert all(f"| {name} |" in run.stdout for name in names)

"""``r3train train --nnodes 2``: two launchers that meet on loopback, each with a rank, as on two machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from r3train.engine.server import free_port
from tests.e2e import jobs
from tests.e2e.live_jobs import end, output, steps_done, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(900)]


@contextmanager
def machines(run_dir: Path, *flags: str) -> Iterator[list[psutil.Popen]]:
    """The launchers of both machines; whatever is left of them and their ranks is ended."""
    meeting = f"127.0.0.1:{free_port('127.0.0.1')}"
    launchers = []
    try:
        for number in range(2):
            command = [sys.executable, "-m", "r3train.cli", "train", "--config", "tiny_cpu"]
            command += ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", meeting]
            command += ["--run-dir", str(run_dir), "--no-plot", *flags]
            # live_jobs.output reads that of machine 0
            name = run_dir.name if number == 0 else f"machine_{number}"
            launchers.append(jobs.start(command, run_dir.parent / f"{name}.txt"))
        yield launchers
    finally:
        for launcher in launchers:
            if launcher.is_running():
                end([*launcher.children(recursive=True), launcher])
            launcher.wait()


def test_two_machines_train_together_and_machine_0_speaks(tmp_path, served_flags):
    run_dir = tmp_path / "run"
    flags = [*served_flags, *jobs.R3_FLAGS, "--num-rollout", "2"]
    with machines(run_dir, *flags) as launchers:
        assert [launcher.wait(timeout=400) for launcher in launchers] == [0, 0], output(run_dir)
    metrics = jobs.Job(0, output(run_dir), run_dir).metrics()
    assert len(metrics) == 2 and all(step["r3/passed"] for step in metrics)
    assert "run finished" in output(run_dir)
    assert "run finished" not in (tmp_path / "machine_1.txt").read_text()


def test_a_rank_that_dies_ends_both_machines(tmp_path, served_flags):
    run_dir = tmp_path / "run"
    flags = [*served_flags, "--num-rollout", "100000"]
    with machines(run_dir, *flags) as launchers:
        wait_for(lambda: steps_done(run_dir) >= 1, launchers[0], run_dir)
        (rank,) = [
            p for p in launchers[1].children() if "r3train.launch.start.train" in p.cmdline()
        ]
        rank.kill()
        assert 0 not in [launcher.wait(timeout=300) for launcher in launchers], output(run_dir)
    assert "was ended by SIGKILL" in (tmp_path / "machine_1.txt").read_text()

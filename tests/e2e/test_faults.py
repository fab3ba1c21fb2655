"""A job ends with its cause, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e import jobs

pytestmark = pytest.mark.e2e


def _start(run_dir: Path, flags: list[str]) -> subprocess.Popen:
    command = jobs.command(run_dir, *flags, *jobs.R3_FLAGS, "--num-rollout", "100000")
    with (run_dir.parent / "out.txt").open("w") as out:
        return subprocess.Popen(
            command,
            cwd=jobs.ROOT,
            env=jobs.environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _wait_for_steps(run_dir: Path, count: int, job: subprocess.Popen, timeout: float = 150) -> None:
    deadline = time.monotonic() + timeout
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        assert job.poll() is None, (run_dir.parent / "out.txt").read_text()
        if metrics.exists() and len(metrics.read_text().splitlines()) >= count:
            return
        time.sleep(0.2)
    raise AssertionError((run_dir.parent / "out.txt").read_text())


def _tree(job: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(job.pid).children(recursive=True)


def _is_sglang(process: psutil.Process) -> bool:
    try:
        return "sglang" in " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return False


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


def test_a_killed_server_ends_the_job_with_its_cause_within_30_s(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    job = _start(run_dir, tiny_flags)
    tree = []
    try:
        _wait_for_steps(run_dir, 2, job)
        tree = _tree(job)
        schedulers = [p for p in tree if "scheduler" in " ".join(p.cmdline()) and _is_sglang(p)]
        os.kill(schedulers[0].pid, signal.SIGKILL)
        code = job.wait(timeout=30)
        assert code != 0
        text = (tmp_path / "out.txt").read_text()
        assert "EngineDied" in text
        assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        _end([*tree, psutil.Process(job.pid)] if job.poll() is None else tree)
        job.wait()


def test_a_trainer_killed_with_sigkill_leaves_no_server_after_15_s(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    job = _start(run_dir, tiny_flags)
    tree = []
    try:
        _wait_for_steps(run_dir, 1, job)
        tree = _tree(job)
        servers = [p for p in tree if _is_sglang(p)]
        assert len(servers) >= 3
        for process in [psutil.Process(job.pid), *(p for p in tree if p not in servers)]:
            process.kill()
        job.wait()
        gone, alive = psutil.wait_procs(servers, timeout=15)
        assert not alive
    finally:
        _end(tree)

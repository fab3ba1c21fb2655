"""A job whose terminal closes: torchrun gets SIGHUP, and what is printed goes nowhere."""

from __future__ import annotations

import os
import pty
import subprocess
import threading

import psutil
import pytest

from r3train.observe.metrics import read_metrics
from tests.e2e import jobs
from tests.e2e.live_jobs import end, pointer, steps_done, wait_for

pytestmark = pytest.mark.e2e


def test_a_job_whose_terminal_closes_saves_its_last_step_and_leaves_nothing(tmp_path, tiny_flags):
    run_dir, saved, screen = tmp_path / "run", tmp_path / "saved", tmp_path / "run.txt"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "100000", "--save", str(saved)]
    ours, theirs = pty.openpty()
    job = psutil.Popen(
        ["setsid", "--ctty", *jobs.command(run_dir, *flags)],
        cwd=jobs.ROOT,
        env=jobs.environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    closed = threading.Event()

    def show() -> None:  # what nobody reads would stop the job
        with screen.open("wb") as file:
            while not closed.is_set():
                try:
                    file.write(os.read(ours, 65536))
                except OSError:
                    return
                file.flush()
        os.close(ours)

    reader, tree = threading.Thread(target=show), []
    reader.start()
    try:
        wait_for(lambda: steps_done(run_dir) >= 3, job, run_dir)
        tree = job.children(recursive=True)
        closed.set()
        reader.join()  # the kernel sends SIGHUP to the session of the terminal
        try:
            job.wait(timeout=120)
        except subprocess.TimeoutExpired:
            pytest.fail("the job goes on without its terminal")
        left = psutil.wait_procs(tree, timeout=30)[1]
        assert not left
    finally:
        closed.set()
        end([*tree, job])
    assert pointer(saved) == len(read_metrics(run_dir)) >= 3
    log = (run_dir / "logs" / "rank_00000.log").read_text()
    assert "Traceback" not in log and "the run failed" not in log, log

"""A job ends with its cause, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from tests.e2e import jobs
from tests.e2e.live_jobs import end, output, running, scheduler, steps_done, wait_for

pytestmark = pytest.mark.e2e

ENDLESS = [*jobs.R3_FLAGS, "--num-rollout", "100000"]


def _is_of_server(process: psutil.Process) -> bool:
    """True for a server's guard, its main program and SGLang's workers."""
    try:
        words = " ".join([process.name(), *process.cmdline()])
        return "sglang" in words or "r3train.engine." in words
    except psutil.NoSuchProcess:
        return False


def test_a_killed_server_ends_the_job_with_its_cause_within_30_s(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    with running(run_dir, *tiny_flags, *ENDLESS) as job:
        wait_for(lambda: steps_done(run_dir) >= 2, job, run_dir)
        tree = job.children(recursive=True)
        try:
            os.kill(scheduler(job).pid, signal.SIGKILL)
            assert job.wait(timeout=30) != 0
            assert "EngineDied" in output(run_dir)
            assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        finally:
            end(tree)


def test_a_reward_that_hangs_ends_the_job_with_its_prompt_and_its_bound(
    tmp_path, tiny_flags, engine
):
    job = jobs.run(
        tmp_path / "run",
        *(*tiny_flags, "--num-rollout", "2", "--rollout-external-engine-addrs", engine),
        *("--custom-rm-path", "tests.e2e.hanging_reward:reward", "--reward-timeout-s", "2"),
        timeout=180,
    )
    assert job.code not in (0, None)
    text = " ".join(job.output.split())
    slow = "reward tests.e2e.hanging_reward:reward took longer than reward_timeout_s 2"
    assert re.search(rf"prompt \S+: {slow} \(sample \d+\)", text)


def test_a_trainer_killed_with_sigkill_leaves_no_server_after_15_s(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    with running(run_dir, *tiny_flags, *ENDLESS) as job:
        wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
        tree = job.children(recursive=True)
        try:
            servers = [p for p in tree if _is_of_server(p)]
            assert len(servers) >= 4
            end([job, *(p for p in tree if p not in servers)])
            job.wait()
            _, alive = psutil.wait_procs(servers, timeout=15)
            assert not alive
        finally:
            end(tree)


def test_torchrun_shows_a_mistake_once(tmp_path):
    job = jobs.run(tmp_path / "run", "--num-rollouts", "3", ranks=3)
    assert job.code != 0 and job.output.count("Did you mean") == 1, job.output

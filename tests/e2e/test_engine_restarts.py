"""Servers of our own that die or hang in mid-rollout: what the job makes of it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from r3train.loop import prompt_log
from tests.e2e import jobs
from tests.e2e.live_jobs import output, pointer, running, steps_done, wait_for

pytestmark = pytest.mark.e2e


def scheduler(job: psutil.Popen) -> psutil.Process:
    """The server's process that computes."""
    for process in job.children(recursive=True):
        try:
            words = " ".join([process.name(), *process.cmdline()])
        except psutil.NoSuchProcess:
            continue
        if "sglang" in words and "scheduler" in words:
            return process
    raise AssertionError("no scheduler")


def all_trained_once(run_dir, num_rollout: int) -> None:
    records = prompt_log.read([run_dir])
    assert not any(prompt_log.audit(records).values())
    assert [g for r in records for g in r["group_ids"]] == list(range(4 * num_rollout))
    assert all(len(group) == 4 for r in records for group in r["sample_ids"])


def test_a_killed_server_comes_back_with_the_current_weights_and_no_sample_is_lost(
    tmp_path, tiny_flags
):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "9", "--max-engine-restarts", "1"]
    with running(run_dir, *flags, "--check-weight-update-equal") as job:
        wait_for(lambda: steps_done(run_dir) >= 3, job, run_dir)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=280) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    metrics = jobs.Job(0, "", run_dir).metrics()
    # the new server was probed after every update, and R3 held at every step
    assert all(m["train/weight_probe_gap"] <= 1e-4 and m["r3/passed"] for m in metrics)
    assert all(m["rollout/staleness_max"] <= 1 for m in metrics)
    all_trained_once(run_dir, 9)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hung_server_is_found_by_its_health_and_restarted(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "8", "--max-engine-restarts", "1"]
    with running(run_dir, *flags, "--engine-health-timeout-s", "8") as job:
        wait_for(lambda: steps_done(run_dir) >= 3, job, run_dir)
        os.kill(scheduler(job).pid, signal.SIGSTOP)
        assert job.wait(timeout=400) == 0, output(run_dir)
    assert "no sign of life" in output(run_dir)
    all_trained_once(run_dir, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_too_many_restarts_the_job_ends_with_a_checkpoint(tmp_path, tiny_flags):
    run_dir, directory = tmp_path / "run", tmp_path / "ck"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "100000", "--save", str(directory)]
    with running(run_dir, *flags, "--max-engine-restarts", "1") as job:
        for steps in (3, 6):
            wait_for(lambda: steps_done(run_dir) >= steps, job, run_dir)
            os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=280) != 0
    assert "max_engine_restarts 1" in output(run_dir)
    assert (
        pointer(directory) == steps_done(run_dir) or pointer(directory) == steps_done(run_dir) + 1
    )

"""Servers of our own that die or hang in mid-rollout: what the job makes of it."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e import jobs
from tests.e2e.accounts import (
    all_trained_once,
    buffered_samples,
    dumped_samples,
    trained_as_they_were,
)
from tests.e2e.live_jobs import output, pointer, running, scheduler, server, steps_done, wait_for

pytestmark = pytest.mark.e2e


def require_closed_to_strangers(server: psutil.Process) -> None:
    """Ask a job's server as another user of the node would, and look at what it inherited."""
    port = server.cmdline()[server.cmdline().index("--port") + 1]
    for path in ("update_weights_from_disk", "start_profile", "generate", "server_info"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", data=b"{}", timeout=30)
        assert refused.value.code == 401, path
    inherited = server.environ()
    assert "PATH" in inherited and "WANDB_API_KEY" not in inherited
    assert inherited["NAMED"] == "by --rollout-server-env"


def test_a_killed_server_comes_back_and_its_requests_go_on_from_their_tokens(
    tmp_path, tiny_flags, monkeypatch
):
    """Answers of 320 tokens in segments of 32: the server dies while many are half done.

    So long an answer takes longer than a step, so that some are always being made.
    """
    monkeypatch.setenv("WANDB_API_KEY", "somebody's")
    monkeypatch.setenv("NAMED", "by --rollout-server-env")
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "4", "--max-engine-restarts", "1"]
    flags += ["--rollout-max-response-len", "320", "--rollout-ignore-eos"]
    flags += ["--rollout-segment-len", "32", "--max-tokens-per-gpu", "4096", "--dump-rollouts"]
    flags += ["--rollout-server-env", "NAMED", "--update-weight-transfer-mode", "shared_memory"]
    with running(run_dir, *flags, "--check-weight-update-equal") as job:
        wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
        require_closed_to_strangers(server(job))
        wait_for(lambda: steps_done(run_dir) >= 2, job, run_dir)
        links = [os.readlink(link) for link in (run_dir / "weights").glob("*.safetensors")]
        # of both ranks, each of which holds half of the experts
        assert len({re.match(r"/proc/\d+/", link)[0] for link in links}) == 2
        # the server keeps nothing of the memory that the next version overwrites
        assert "memfd:" not in Path(f"/proc/{scheduler(job).pid}/maps").read_text()
        time.sleep(0.4 * jobs.Job(0, "", run_dir).metrics()[1]["perf/step_s"])
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=480) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    metrics = jobs.Job(0, "", run_dir).metrics()
    # the new server was probed after every update, and R3 held at every step
    assert all(m["served/gap_max"] <= 1e-4 and m["r3/passed"] for m in metrics)
    assert all(m["rollout/staleness_max"] <= 1 for m in metrics)
    # tokens of the dead server were gone on with, in whole segments
    kept, again = (metrics[-1][f"faults/{n}"] for n in ("resumed_tokens", "resubmitted_requests"))
    assert again > 0 and kept > 0 and kept % 32 == 0
    # and they have the rows that came with them: none is missing, or was guessed
    all_trained_once([run_dir], 4)
    for sample in dumped_samples(run_dir, range(4)).values():
        assert sample.response_len == 320
        assert len(sample.routed_experts) == 319 + sample.prompt_len
        assert (sample.routed_experts != 255).all()


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
    all_trained_once([run_dir], 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_too_many_restarts_the_job_ends_with_a_checkpoint(tmp_path, tiny_flags):
    run_dir, directory = tmp_path / "run", tmp_path / "ck"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--save", str(directory), "--auto-resume"]
    failing = [*flags, "--num-rollout", "100000", "--max-engine-restarts", "1"]
    with running(run_dir, *failing) as job:
        for steps in (3, 6):
            wait_for(lambda: steps_done(run_dir) >= steps, job, run_dir)
            os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=280) != 0
    assert "max_engine_restarts 1" in output(run_dir)
    done = pointer(directory)
    assert done in (steps_done(run_dir), steps_done(run_dir) + 1)
    # and goes on from there: what was complete is trained, and nothing twice
    kept = buffered_samples(directory, done)
    flags += ["--num-rollout", str(done + 2), "--dump-rollouts"]
    resumed = jobs.run(tmp_path / "resumed", *flags)
    assert resumed.code == 0, resumed.output
    all_trained_once([run_dir, resumed.run_dir], done + 2)
    trained_as_they_were(kept, dumped_samples(resumed.run_dir, (done, done + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_server_that_dies_in_the_broadcast_of_a_later_stage_is_named_or_comes_back(
    restarts, tmp_path, tiny_flags
):
    job = jobs.run(
        tmp_path / "run",
        *tiny_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 1".split(),
        *"--update-weight-buffer-size 200000 --check-weight-update-equal".split(),
        "--max-engine-restarts",
        str(restarts),
        program=("-m", "tests.e2e.loss_in_a_stage"),
        timeout=200,
    )
    metrics = job.metrics()
    assert all(m["served/gap_max"] <= 1e-4 and m["r3/passed"] for m in metrics)
    if restarts:
        assert job.code == 0, job.output
        assert [m["faults/engine_restarts"] for m in metrics] == [0, 1, 1, 1]
    else:
        assert job.code != 0 and len(metrics) == 1
        assert job.output.count("error: EngineDied: the SGLang server") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_servers_lost_loses_no_prompt(tmp_path, tiny_flags):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "12", "--max-engine-restarts", "1"]
    flags += ["--rollout-num-engines", "2", "--check-weight-update-equal"]
    with running(run_dir, *flags) as job:
        wait_for(lambda: steps_done(run_dir) >= 3, job, run_dir)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=400) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert all(m["served/gap_max"] <= 1e-4 and m["r3/passed"] for m in metrics)
    all_trained_once([run_dir], 12)

"""The README's promise: the demo learns, and R3 is exact at every step of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from r3train.observe.metrics import summarise
from r3train.verify.tiny import TinyOptions, build
from tests.e2e import checkouts, jobs
from tests.e2e.live_jobs import output, running, scheduler, steps_done, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_make_demo_learns_with_r3_exact_at_every_step(tmp_path):
    """The README's first command as it stands there, with a server of its own."""
    checkouts.need_make()
    checkout = checkouts.linked(tmp_path)
    python = f"PYTHON=python{sys.version_info.major}.{sys.version_info.minor}"
    made = subprocess.run(
        ["make", python, "demo", "ARGS=--run-dir runs/demo"],
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    learns(jobs.Job(made.returncode, made.stdout, checkout / "runs" / "demo"))


# the other two have latent attention
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "moonlight", "glm4_moe_lite"])
def test_the_demo_learns_with_other_seeds_and_families(family, seed, tmp_path):
    build(tmp_path / "tiny", TinyOptions(family=family, seed=seed))
    job = jobs.run(
        tmp_path / "run",
        *jobs.R3_FLAGS,
        "--hf-checkpoint",
        str(tmp_path / "tiny/model"),
        "--prompt-data",
        str(tmp_path / "tiny/prompts.jsonl"),
        *f"--seed {seed} --rollout-seed {seed}".split(),
        timeout=500,
    )
    learns(job)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("serving", ["merged", "adapter"])
@pytest.mark.timeout(900)
def test_the_demo_learns_with_adapters_on_two_servers_of_which_one_dies(serving, seed, tmp_path):
    build(tmp_path / "tiny", TinyOptions(seed=seed))
    run_dir = tmp_path / "run"
    flags = [
        *jobs.R3_FLAGS,
        "--hf-checkpoint",
        str(tmp_path / "tiny/model"),
        "--prompt-data",
        str(tmp_path / "tiny/prompts.jsonl"),
        *f"--seed {seed} --rollout-seed {seed}".split(),
        *"--lora-rank 8 --lora-alpha 16".split(),
        "--lora-serving",
        serving,
        # a low rank learns slower; at 2e-2 it does not learn, and at a constant 6e-3 not for long
        *"--lr 6e-3 --lr-decay-style linear --num-rollout 120 --rollout-num-engines 2".split(),
        *"--max-engine-restarts 1 --check-weight-update-equal".split(),
    ]
    with running(run_dir, *flags) as job:
        wait_for(lambda: steps_done(run_dir) >= 20, job, run_dir, timeout=600)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=600) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    done = jobs.Job(0, output(run_dir), run_dir)
    learns(done, steps=120)
    metrics = done.metrics()
    # behind the first step B is not zero: a server without the adapter would not agree
    assert all(m["served/gap_max"] <= 1e-4 for m in metrics)
    # a kill or an early update leaves a rollout without a sample that was rechecked
    audited = [m["recheck/passed"] for m in metrics]
    assert False not in audited and audited.count(True) >= 108


def learns(job: jobs.Job, *, steps: int = 60) -> None:
    assert job.code == 0, job.output
    metrics = job.metrics()
    summary = summarise(metrics)
    print(f"reward {summary['reward_first']:.3f} to {summary['reward_last']:.3f}")
    assert summary["steps"] == steps and summary["r3"] == "passed"
    assert summary["reward_first"] <= 0.4
    assert summary["reward_last"] >= 0.8
    assert all(m["r3/num_calls"] == m["r3/num_calls_expected"] for m in metrics)
    assert (job.run_dir / "plot.png").stat().st_size > 10_000

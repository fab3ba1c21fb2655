"""A job ends with its cause, and leaves nothing after."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import psutil
import pytest

from r3train.loop.replay_source import dump_rollout
from r3train.types import Prompt, RolloutSample
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


@pytest.mark.parametrize(
    "reward, does",
    [
        ("late_hangs_async", r"took longer than reward_timeout_s 2 \(sample \d+\)"),
        pytest.param("late_fails", "raised KeyError: 'gold'", marks=pytest.mark.slow),
        pytest.param("late_exits", "raised SystemExit: 0", marks=pytest.mark.slow),
        pytest.param(
            "late_ends_its_process", r"ended its process \(exit code 3\)", marks=pytest.mark.slow
        ),
        pytest.param(
            "late_floods", r"raised ValueError: y+\.\.\. \(10000000 ch", marks=pytest.mark.slow
        ),
    ],
)
def test_a_reward_that_misbehaves_ends_the_job_with_its_prompt_and_what_it_does(
    reward, does, tmp_path, served_flags
):
    path = f"tests.unit.reward_functions:{reward}"
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *"--num-rollout 2".split(),
        "--custom-rm-path",
        path,
        *"--reward-timeout-s 2".split(),
        "--save",
        str(tmp_path / "saved"),
        timeout=180,
    )
    assert job.code == 1
    assert "generation failed after 0 rollouts; a checkpoint was saved" in job.output
    assert re.search(rf"prompt \S+: reward {path} {does}", " ".join(job.output.split()))


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
    job = jobs.run(tmp_path / "run", "--num-rollouts", "3", ranks=3, torchrun=True)
    assert job.code != 0 and job.output.count("Did you mean") == 1, job.output
    assert "Traceback" not in job.output and "ChildFailedError" not in job.output, job.output


GUESTS = "tests.unit.faulty_user_code"
WITH_KL = ("--kl-coef", "0.1", "--ref-load")


@pytest.fixture
def two_rollouts(tmp_path, tiny_flags) -> tuple[str, ...]:
    """Flags of a job that trains on two recorded rollouts of four samples, and starts no server."""
    prompt = Prompt("p", 0, "", np.array([3, 4], np.int32), ["a"])
    samples = [
        RolloutSample(
            sample_id=i,
            group_id=i // 2,
            prompt=prompt,
            token_ids=np.array([3, 4, 5 + i, 6, 7], np.int32),
            prompt_len=2,
            loss_mask=np.array([False, False, True, True, True]),
            rollout_log_probs=np.array([0, 0, -4, -4, -4], np.float32),
            routed_experts=None,
            weight_versions=np.array([-1, -1, 0, 0, 0], np.int32),
            finish_reason="stop",
            text="",
        )
        for i in range(8)
    ]
    for rollout_id in range(2):
        own = samples[4 * rollout_id : 4 * rollout_id + 4]
        groups = [[(s, float(s.sample_id % 2)) for s in pair] for pair in (own[:2], own[2:])]
        dump_rollout(tmp_path / "rollouts", rollout_id, groups)
    return (
        *tiny_flags,
        *"--rollout-batch-size 2 --n-samples-per-prompt 2 --expert-model-parallel-size 1".split(),
        *"--num-rollout 2 --global-batch-size 4".split(),
        "--replay-rollouts",
        str(tmp_path / "rollouts"),
    )


@pytest.mark.parametrize(
    "flags, ranks, before, what, cause",
    [
        pytest.param(
            ("--advantage-estimator", f"{GUESTS}:advantages_fail_later"),
            1,
            (),
            "a rollout could not be scored",
            "raised KeyError: 'gold'",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--advantage-estimator", f"{GUESTS}:advantages_fail_behind_the_reference"),
            2,
            WITH_KL,
            "a rollout could not be trained",
            "raised KeyError: 'gold'",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # as in the test below, in a rollout's first step
            ("--policy-loss", f"{GUESTS}:loss_fails_later_on_rank_1"),
            2,
            (),
            "a rollout could not be trained",
            "raised KeyError: 'gold'",
            marks=pytest.mark.slow,
        ),
        (
            ("--policy-loss", f"{GUESTS}:loss_fails_between_its_sums_on_rank_1"),
            2,
            ("--context-parallel-size", "2"),
            "a rollout could not be trained",
            "raised KeyError: 'gold'",
        ),
        (
            ("--policy-loss", f"{GUESTS}:loss_fails_backward_later_on_rank_1"),
            2,
            (),
            "a rollout could not be trained",
            "its backward pass: raised KeyError: 'gold'",
        ),
    ],
    ids=[
        "estimator",
        "estimator after the reference",
        "loss on one rank",
        "loss on one of the ranks of a sample",
        "backward of a loss",
    ],
)
def test_a_rule_that_fails_is_named_and_its_rollout_trained_after_a_resumption(
    flags, ranks, before, what, cause, tmp_path, tiny, two_rollouts
):
    given, settings = flags, (
        *two_rollouts,
        "--save",
        str(tmp_path / "saved"),
        *before,
        *([str(tiny / "model")] if before == WITH_KL else []),
    )
    failed = jobs.run(tmp_path / "failed", *settings, *given, ranks=ranks, torchrun=True)
    assert failed.code == 1, failed.output
    named = f"{' '.join(given)}: {cause}"
    output = " ".join(failed.output.split())
    assert f"{what} after 1 rollouts; a checkpoint was saved: {named}" in output
    assert f"UserCodeFailed: {named}" in output and "ChildFailedError" not in output
    resumed = jobs.run(
        tmp_path / "resumed", *settings, "--load", str(tmp_path / "saved"), ranks=ranks
    )
    assert resumed.code == 0, resumed.output
    steps = [record["step"] for job in (failed, resumed) for record in job.metrics()]
    assert steps == [0, 1]
    if given[0] == "--policy-loss":  # which is the default, but for its end
        whole = jobs.run(
            tmp_path / "whole", *settings, "--save", str(tmp_path / "own"), ranks=ranks
        )
        jobs.same_numbers(whole.metrics(), failed.metrics() + resumed.metrics())


def test_a_loss_that_fails_in_a_later_step_of_a_rollout_leaves_a_checkpoint_behind_that_rollout(
    tmp_path, two_rollouts
):
    settings = (*two_rollouts, "--save", str(tmp_path / "saved"), "--global-batch-size", "2")
    fails = ("--policy-loss", f"{GUESTS}:loss_fails_later_on_rank_1", "--max-bad-steps", "1")
    failed = jobs.run(tmp_path / "failed", *settings, *fails)
    assert failed.code == 1, failed.output
    output = " ".join(failed.output.split())
    named = f"--policy-loss {fails[1]}: raised KeyError: 'gold'"
    assert (
        f"a rollout was trained in part after 1 rollouts; a checkpoint was saved: {named}" in output
    )
    assert f"UserCodeFailed: {named}" in output
    [step] = failed.metrics()
    assert step["train/skipped_steps"] == 1
    assert (failed.run_dir / "bad_steps" / "rollout_0000000.safetensors").exists()
    resumed = jobs.run(tmp_path / "resumed", *settings, "--load", str(tmp_path / "saved"))
    assert resumed.code == 0, resumed.output
    [step] = resumed.metrics()
    assert step["step"] == 1 and step["train/skipped_steps"] == 0  # of finite weights


def test_a_job_that_is_told_to_stop_while_a_loss_hangs_ends_within_its_grace_period(
    tmp_path, two_rollouts
):
    run_dir = tmp_path / "run"
    hanging = ("--policy-loss", f"{GUESTS}:loss_hangs_later_on_rank_1")
    with running(run_dir, *two_rollouts, *hanging, "--signal-grace-s", "5") as job:
        log = run_dir / "logs" / "rank_00001.log"
        hangs = lambda: log.exists() and "the loss hangs" in log.read_text()  # noqa: E731
        wait_for(hangs, job, run_dir, timeout=200)
        tree = job.children(recursive=True)
        job.terminate()
        assert job.wait(timeout=28) != 0  # torchrun itself would kill its ranks after 30 s
        assert not psutil.wait_procs(tree, timeout=5)[1]
    assert steps_done(run_dir) == 1


@pytest.mark.slow
def test_a_loss_that_never_returns_ends_the_job_as_a_rank_that_hangs_does(tmp_path, two_rollouts):
    hanging = ("--policy-loss", f"{GUESTS}:loss_hangs_later_on_rank_1")
    job = jobs.run(
        tmp_path / "run", *two_rollouts, *hanging, "--distributed-timeout-minutes", "1", timeout=300
    )
    assert job.code == 1 and "Timed out waiting 60000ms" in job.output, job.output
    assert len(job.metrics()) == 1

"""Sessions of agents in every pause mode, on servers that retract and die, with stores, adapters and a resume."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.e2e import jobs
from tests.e2e.accounts import audited, buffered_samples, dumped_samples, trained_as_they_were
from tests.e2e.accounts import trained_samples
from tests.e2e.live_jobs import output, pointer, rank_processes, running, scheduler
from tests.e2e.live_jobs import steps_done, wait_for
from tests.e2e.scripted_agent import OF_FIRST_STEP, TOKENS, WAITS_FOR
from tests.e2e.tool_calculator import use_template

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, CUSTODY, SERVED
from r3train.verify.tiny import TinyOptions, build

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

OF_A_STEP = OF_FIRST_STEP  # sessions: 4 groups of 4


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    build(directory, TinyOptions(), force=True)
    use_template(directory / "model")
    return directory


def flags_of(task, agent: str = "branching", response: int = 80) -> list[str]:
    return [
        *f"--hf-checkpoint {task / 'model'} --prompt-data {task / 'prompts.jsonl'}".split(),
        *"--rollout-batch-size 4 --n-samples-per-prompt 4 --no-plot".split(),
        *jobs.FEW_ROWS,
        *"--no-tensorboard --apply-chat-template".split(),
        "--agent",
        f"tests.e2e.scripted_agent:{agent}",
        *"--agent-tool-call-parser tests.e2e.scripted_agent:first_word_is_a_call".split(),
        "--rollout-max-response-len",
        str(response),
        "--rollout-max-context-len",
        str(response + 40),
    ]


R3 = (*jobs.R3_FLAGS, "--r3-recheck-share", "0.25")
# answers of up to 80 tokens: updates come in the middle of calls
LONG = ("branching", 260)


def sessions_of(run_dir: Path) -> list[dict]:
    """The sessions that ended in a run: each has an id of its own, the four samples of ``branching`` and no failure."""
    sessions = [json.loads(line) for line in (run_dir / "sessions.jsonl").read_text().splitlines()]
    ids = [session["sample_id"] for session in sessions]
    assert len(ids) == len(set(ids)), "a session was sampled twice"
    for session in sessions:
        begins = sorted(sample["begins"] for sample in session["samples"])
        assert session["failure"] is None and begins == ["fork", "root", "root", "root"]
    return sessions


def proved(run_dir: Path, steps: int) -> list[dict]:
    """All verdicts of a run, and that of every step; returns its metrics."""
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert [m["step"] for m in metrics] == list(range(steps))
    assert all(m["r3/passed"] is True and m["agent/custody_passed"] is True for m in metrics)
    audit = audit_run(run_dir)
    assert set(audit.claims) - {SERVED} == {*CLAIMS, CUSTODY}  # no canaries with --colocate
    assert set(audit.claims.values()) == {"passed"}, audit.findings
    assert audit.numbers["custody"]["sessions"] == OF_A_STEP * steps
    records = audited([run_dir])
    ids = trained_samples(records)
    assert len(ids) == len(set(ids)) == 4 * OF_A_STEP * steps
    assert {s["sample_id"] for s in sessions_of(run_dir)} >= {64 * (i // 64) for i in ids}
    return metrics


def total(metrics: list[dict], name: str) -> float:
    return sum(m[name] for m in metrics)


@pytest.fixture(autouse=True)
def goes_on_after_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv(WAITS_FOR, str(tmp_path / "run" / "metrics.jsonl"))


def test_in_place_updates_four_steps_ahead_with_route_stores_and_retractions(
    task, tmp_path, monkeypatch
):
    """A pool for half of the requests that may be in flight: the server counts on one more token of each.

    Evaluations play the same agents beside them, each under one version.
    """
    few = tmp_path / "few.jsonl"
    few.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "1")
    monkeypatch.setenv(TOKENS, "80")
    job = jobs.run(
        tmp_path / "run",
        *flags_of(task, *LONG),
        *R3,
        *"--num-rollout 6 --route-stores --pause-generation-mode in_place".split(),
        *"--max-weight-staleness 4 --rollout-max-concurrency 10 --agent-max-sessions 64".split(),
        *"--sglang-max-total-tokens 900 --sglang-schedule-conservativeness 0.01".split(),
        *f"--eval-prompt-data few {few} --eval-interval 3 --skip-eval-before-train".split(),
        *"--eval-max-response-len 260".split(),
    )
    assert job.code == 0, job.output
    metrics = proved(job.run_dir, 6)
    assert total(metrics, "rollout/retracted") > 0, "the pool was large enough"
    assert total(metrics, "rollout/retracted_samples") == 0
    assert total(metrics, "rollout/spanning_samples") > 0
    assert max(m["rollout/staleness_max"] for m in metrics) > 1
    assert total(metrics, "perf/route_wire_bytes_rank0") == 0
    evaluated = (job.run_dir / "eval" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluated] == [3, 6]
    for file in (job.run_dir / "eval").glob("*-few.jsonl"):
        versions = {json.loads(row)["version"] for row in file.read_text().splitlines()}
        assert versions == {int(file.name[:7])}


def test_aborting_updates_one_step_ahead_and_a_server_killed_in_open_sessions(
    task, tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKENS, "80")
    run_dir = tmp_path / "run"
    with running(
        run_dir,
        *flags_of(task, *LONG),
        *R3,
        *"--num-rollout 5 --pause-generation-mode abort --max-weight-staleness 1".split(),
        *"--max-engine-restarts 1 --rollout-segment-len 8".split(),
        # few at once: generation takes longer than a step, and updates find calls in flight
        *"--rollout-max-concurrency 4 --agent-max-sessions 64".split(),
    ) as job:
        wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
        # sessions go on, and their calls do not end: all of them are open
        os.kill(scheduler(job).pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=480) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    metrics = proved(run_dir, 5)
    assert metrics[-1]["faults/resubmitted_requests"] > 0, "no call was in flight"
    assert total(metrics, "rollout/spanning_samples") > 0
    assert total(metrics, "rollout/resumed") > 0, "no update aborted a call"


def test_drained_updates_of_a_colocated_synchronous_run(task, tmp_path):
    job = jobs.run(
        tmp_path / "run",
        *flags_of(task),
        *R3,
        *"--num-rollout 3 --colocate --max-weight-staleness 0 --mask-truncated".split(),
        *"--overlong-buffer-len 10 --overlong-penalty-factor 0.5".split(),
    )
    assert job.code == 0, job.output
    metrics = proved(job.run_dir, 3)
    assert all(m["agent/cut_by_client"] > 0 for m in metrics), "no loss was taken"
    assert max(m["rollout/staleness_max"] for m in metrics) == 0
    assert all(m["train/log_prob_gap_mean"] < 1e-5 for m in metrics)
    assert len(sessions_of(job.run_dir)) == 3 * OF_A_STEP


def test_adapters_on_the_server_where_each_answer_has_one_version(task, tmp_path):
    job = jobs.run(
        tmp_path / "run",
        *flags_of(task),
        *R3,
        *"--num-rollout 4 --dump-rollouts --lora-rank 4 --lora-alpha 8".split(),
        *"--lora-serving adapter --lr 2e-3 --max-weight-staleness 2".split(),
        "--check-weight-update-equal",
    )
    assert job.code == 0, job.output
    metrics = proved(job.run_dir, 4)
    assert total(metrics, "rollout/spanning_samples") > 0, "no update came between calls"
    assert metrics[-1]["served/gap_max"] <= 1e-4


def test_retracting_updates_without_replay_train_each_token_of_a_session_once(
    task, tmp_path, monkeypatch
):
    """R3 and this mode are refused together, so there is no evidence: the dumped samples are compared with the calls."""
    monkeypatch.setenv(TOKENS, "80")
    flags = [*flags_of(task, *LONG), "--pause-generation-mode", "retract"]
    flags += ["--max-weight-staleness", "1"]
    job = jobs.run(tmp_path / "run", *flags, "--num-rollout", "3", "--dump-rollouts")
    assert job.code == 0, job.output
    assert total(job.metrics(), "rollout/spanning_samples") > 0
    with_loss = {
        sample["sample_id"]: sample["with_loss"]
        for session in sessions_of(job.run_dir)
        for sample in session["samples"]
    }
    samples = dumped_samples(job.run_dir, range(3))
    assert len(samples) == 3 * 4 * OF_A_STEP
    for sample_id, sample in samples.items():
        assert int(sample.loss_mask.sum()) == with_loss[sample_id] > 0
    assert audit_run(job.run_dir).verdict != "passed"


def test_a_stop_in_open_sessions_loses_no_finished_one_and_a_resume_samples_the_others_anew(
    task, tmp_path, monkeypatch
):
    run_dir, saved, goes_on = tmp_path / "run", tmp_path / "ck", tmp_path / "goes_on"
    monkeypatch.setenv(WAITS_FOR, str(goes_on))
    flags = [*flags_of(task, "every_other"), *R3, "--num-rollout", "4", "--dump-rollouts"]
    flags += ["--save", str(saved), "--auto-resume", "--max-weight-staleness", "1"]

    def ended() -> int:
        file = run_dir / "sessions.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    with running(run_dir, *flags) as job:
        # the first step's, and every other one of the two that may follow it
        wait_for(lambda: ended() == 2 * OF_A_STEP, job, run_dir)
        rank_processes(job)[0].send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) == 0, output(run_dir)
    kept = buffered_samples(saved, pointer(saved))
    sessions = {sample.trajectory_id for sample in kept.values()}
    assert (pointer(saved), len(sessions), ended()) == (1, OF_A_STEP, 2 * OF_A_STEP)
    goes_on.write_text("now\n")
    resumed = jobs.run(run_dir, *flags)
    assert resumed.code == 0, resumed.output
    proved(run_dir, 4)
    trained_as_they_were(kept, dumped_samples(run_dir, range(1, 4)))

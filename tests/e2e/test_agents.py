"""Jobs whose rollouts agents make, through the chat endpoint, with R3 and its evidence."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from tests.e2e import jobs
from tests.e2e.command_agent import FAILS
from tests.e2e.scripted_agent import TURNS, WAITS_FOR
from tests.e2e.tool_calculator import use_template

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, CUSTODY, SERVED
from r3train.cpu.device import prepare_device
from r3train.verify.tiny import TinyOptions, build

pytestmark = pytest.mark.e2e

STEPS = 4
# a session's directory is not the checkout
COMMAND = f"{sys.executable} {jobs.ROOT / 'tests/e2e/command_agent.py'}"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    build(directory, TinyOptions(), force=True)
    use_template(directory / "model")
    return directory


@pytest.fixture(scope="module")
def flags(task, engine) -> list[str]:
    return [
        *f"--hf-checkpoint {task / 'model'} --prompt-data {task / 'prompts.jsonl'}".split(),
        *"--rollout-batch-size 4 --n-samples-per-prompt 4 --no-plot".split(),
        *jobs.FEW_ROWS,
        "--no-tensorboard",
        "--num-rollout",
        str(STEPS),
        *jobs.R3_FLAGS,
        "--apply-chat-template",
        "--rollout-external-engine-addrs",
        engine,
        *"--rollout-max-response-len 80 --rollout-max-context-len 120".split(),
        *"--max-weight-staleness 2 --pause-generation-mode in_place".split(),
        *"--r3-recheck-share 0.25".split(),
    ]


@pytest.mark.gate
def test_a_job_trains_on_sessions_with_updates_between_their_turns(flags, tmp_path, monkeypatch):
    """Updates in place, route stores, and sessions of two kinds: one chain, and a tree with another beginning."""
    monkeypatch.setenv(WAITS_FOR, str(tmp_path / "run" / "metrics.jsonl"))
    agent = ["--agent", "tests.e2e.scripted_agent:run_or_branch", "--route-stores"]
    agent += ["--agent-tool-call-parser", "tests.e2e.scripted_agent:first_word_is_a_call"]
    job = jobs.run(tmp_path / "run", *flags, *agent)
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4
    assert all(m["agent/custody_passed"] is True for m in metrics)
    assert all(m["perf/route_wire_bytes_rank0"] == 0 for m in metrics)
    assert sum(m["perf/route_store_wire_bytes_max"] for m in metrics) > 0
    assert sum(m["perf/route_store_fetched_bytes_max"] for m in metrics) > 0
    assert sum(m["rollout/spanning_samples"] for m in metrics) > 0, "no session saw an update"
    assert "HTTP Request" not in job.logs(), "a line for each call"
    sessions = [
        json.loads(line) for line in (job.run_dir / "sessions.jsonl").read_text().splitlines()
    ]
    assert all(s["failure"] is None for s in sessions) and len(sessions) >= 16 * STEPS
    begins = [tuple(sorted(sample["begins"] for sample in s["samples"])) for s in sessions]
    # three turns; and an answer, one request behind it and a fork; another beginning
    assert set(begins) == {("root",), ("fork", "root", "root", "root")}
    assert {s["calls"] for s, b in zip(sessions, begins) if len(b) == 1} == {TURNS}
    ended = [m for m in metrics if "agent/sessions" in m]  # in a step all may have ended before
    assert ended and all(0 <= m["agent/forks_mean"] <= 1 for m in ended)
    assert any(0 < m["agent/forks_mean"] and 0 < m["agent/reprompted_share"] < 1 for m in ended)
    assert all(m["agent/tool_calls_mean"] > 0 and m["agent/refused"] == 0 for m in ended)
    assert all(s["requests"][0]["request"] == "POST /v1/chat/completions" for s in sessions)
    rows = list(map(json.loads, (job.run_dir / "samples.jsonl").read_text().splitlines()))
    assert len(rows) == 3 * STEPS and {len(row["conversations"]) for row in rows} <= {1, 4}
    for whole in (row["conversations"][0] for row in rows if len(row["conversations"]) == 1):
        turns = [text.partition(":")[0] for text in whole]
        assert turns[:2] == ["user", "assistant"] and turns.count("assistant") == TURNS
        assert (turns[2] == "tool") == (
            "calls make " in whole[1]
        )  # an answer without a word is none
        assert turns[2] == "user" or whole[1].endswith(f'{{"a": "{whole[2][6:]}"}}')
    audit = audit_run(job.run_dir)
    assert audit.claims == dict.fromkeys((*CLAIMS, SERVED, CUSTODY), "passed"), audit.findings
    assert audit.numbers["custody"]["sessions"] == 16 * STEPS
    for damage, said in (
        (
            lambda s: s.replace('"with_loss": [[', '"with_loss": [[0, 1], [', 1),
            "tokens .* have loss",
        ),
        (lambda s: s[s.index("\n") + 1 :], "custody of the run's own verdict"),
    ):
        file = job.run_dir / "evidence" / "custody.jsonl"
        before = file.read_text()
        file.write_text(damage(before))
        audit = audit_run(job.run_dir)
        file.write_text(before)
        assert audit.claims[CUSTODY] == "failed"
        assert any(re.search(said, finding.what) for finding in audit.findings), audit.findings


CAUGHT = {
    "fork_trains_its_prefix": r"custody of session \d+: sample \d+: tokens .* have loss",
    "chain_is_lost": r"custody: sample \d+ is not there, and \d+ tokens .* R3 check failed at step 0",
}


# the gate's own are in the evidence of the job above, and in test_planted_session_bugs.py
@pytest.mark.parametrize("bug", CAUGHT)
def test_a_job_whose_sessions_lose_or_double_tokens_ends(bug, flags, tmp_path, monkeypatch):
    prepare_device()
    from tests.oracle.planted import planted_by

    assert {found.name for found in planted_by("tests/e2e/test_agents.py")} == set(CAUGHT)
    monkeypatch.setenv(WAITS_FOR, str(tmp_path / "run" / "metrics.jsonl"))
    agent = ("--agent", "tests.e2e.scripted_agent:branching", "--num-rollout", "1")
    parsers = ("--agent-tool-call-parser", "none", "--agent-reasoning-parser", "none")
    job = jobs.run(
        tmp_path / "run",
        *flags,
        *agent,
        *parsers,
        *"--r3-recheck-share 0".split(),
        program=("-m", "tests.e2e.train_with_bug", bug),
    )
    assert job.code != 0
    assert re.search(CAUGHT[bug], " ".join(job.output.split())), job.output


def test_a_failure_of_all_sessions_is_one_line_on_the_screen_though_the_run_goes_on(
    flags, tmp_path
):
    """The refusals are in the metrics and in sessions.jsonl, each with its path."""
    agent = "--agent tests.e2e.scripted_agent:fails --agent-on-failure train --num-rollout 1"
    parsers = "--agent-tool-call-parser none --agent-reasoning-parser none"
    job = jobs.run(tmp_path / "run", *flags, *f"{agent} {parsers}".split())
    assert job.code == 0, job.output
    [line] = [line for line in job.output.splitlines() if "sessions of agents failed" in line]
    [metrics] = job.metrics()
    ended = metrics["agent/sessions"]
    assert f"all {ended} " in line and f" {ended} of them" in line and "no embeddings" in line
    assert metrics["agent/failures"] == ended == metrics["agent/refused"]
    assert metrics["agent/refused_not_found"] == ended
    for text in (job.run_dir / "sessions.jsonl").read_text().splitlines():
        [_, refused] = json.loads(text)["requests"]
        assert (refused["request"], refused["status"]) == ("POST /v1/embeddings", 404)


def test_a_command_makes_rollouts_and_evaluations_and_groups_at_which_it_fails_are_replaced(
    task, flags, tmp_path
):
    few = tmp_path / "few.jsonl"
    rows = (task / "prompts.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join([row for row in rows if FAILS not in row][:3]))
    job = jobs.run(
        tmp_path / "run",
        *flags,
        "--agent-command",
        COMMAND,
        *"--agent-tool-call-parser none --agent-on-failure drop".split(),
        *"--agent-max-sessions 4 --num-rollout 2".split(),
        *"--rollout-batch-size 2 --n-samples-per-prompt 2".split(),
        *f"--eval-prompt-data few {few} --skip-eval-before-train".split(),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert [m["r3/passed"] for m in metrics if "r3/passed" in m] == [True] * 2
    outcomes = [json.loads(x) for x in (job.run_dir / "outcomes.jsonl").read_text().splitlines()]
    dropped = {o["prompt_id"] for o in outcomes if o["outcome"] == "dropped_agent"}
    lines = (task / "prompts.jsonl").read_text().splitlines()
    failing = {f"prompts.jsonl:{n}" for n, line in enumerate(lines, 1) if FAILS in line}
    trained = {o["prompt_id"] for o in outcomes if o["outcome"] == "trained"}
    assert dropped and dropped <= failing and not trained & failing and len(trained) == 4
    assert audit_run(job.run_dir).claims[CUSTODY] == "passed"
    found = (job.run_dir / "eval" / "metrics.jsonl").read_text().splitlines()
    evaluated = json.loads(found[-1])
    assert evaluated["eval/few/num_samples"] == 3
    assert evaluated["eval/few/mean"] > 0
    assert not list((job.run_dir / "agents").iterdir()), "a session's directory goes with it"


def test_a_checkpoint_is_evaluated_by_workers_of_the_agent_that_is_trained(task, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((task / "prompts.jsonl").read_text().splitlines(keepends=True)[:5]))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "r3train.cli",
            "eval",
            str(task / "model"),
            "--agent-command",
            f"{COMMAND} worker",
            *"--apply-chat-template --agent-tool-call-parser none --agent-workers 3".split(),
            *f"--eval-prompt-data other {few} few {few}".split(),
            *"--eval-max-response-len 60 --n-samples-per-eval-prompt 2".split(),
            *f"--run-dir {tmp_path / 'run'} --no-tensorboard".split(),
        ],
        cwd=jobs.ROOT,
        env=jobs.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = (tmp_path / "run" / "eval" / "metrics.jsonl").read_text().splitlines()
    evaluated = json.loads(found[-1])
    assert evaluated["eval/few/num_samples"] == 10 and evaluated["eval/few/mean"] > 0
    assert not list((tmp_path / "run" / "agents").iterdir())
    rows = [
        json.loads(x)
        for x in next((tmp_path / "run" / "eval").glob("*-few.jsonl")).read_text().splitlines()
    ]
    assert {row["reward"] for row in rows if FAILS in row["prompt"]} == {0.0}

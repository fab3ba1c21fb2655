"""Jobs whose rollouts agents make, through the chat endpoint, with R3 and its evidence."""

from __future__ import annotations

import json
import re

import pytest
from tests.e2e import jobs
from tests.e2e.scripted_agent import TURNS
from tests.e2e.tool_calculator import use_template

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import CLAIMS, CUSTODY
from r3train.verify.tiny import TinyOptions, build

pytestmark = pytest.mark.e2e

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    build(directory, TinyOptions(), force=True)
    use_template(directory / "model")
    return directory


def flags_of(task, agent: str) -> list[str]:
    return [
        *("--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "prompts.jsonl")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-plot", *jobs.FEW_ROWS),
        *("--no-tensorboard", "--num-rollout", str(STEPS), *jobs.R3_FLAGS),
        *("--agent", f"tests.e2e.scripted_agent:{agent}", "--apply-chat-template"),
        *("--agent-tool-call-parser", "tests.e2e.scripted_agent:first_word_is_a_call"),
        *("--rollout-max-response-len", "80", "--rollout-max-context-len", "120"),
        *("--max-weight-staleness", "2", "--pause-generation-mode", "in_place"),
        *("--r3-audit-share", "0.25"),
    ]


@pytest.mark.parametrize("agent", ["run", "branching"])
def test_a_job_trains_on_sessions_with_updates_between_their_turns(agent, task, tmp_path):
    job = jobs.run(tmp_path / "run", *flags_of(task, agent))
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert metrics[0]["train/log_prob_gap_max"] <= 1e-4
    assert all(m["agent/custody_passed"] is True for m in metrics)
    assert sum(m["rollout/spanning_samples"] for m in metrics) > 0, "no session saw an update"
    sessions = [
        json.loads(line) for line in (job.run_dir / "sessions.jsonl").read_text().splitlines()
    ]
    assert all(s["failure"] is None for s in sessions) and len(sessions) >= 16 * STEPS
    begins = [[sample["begins"] for sample in s["samples"]] for s in sessions]
    if agent == "run":
        assert begins == [["root"]] * len(begins) and {s["calls"] for s in sessions} == {TURNS}
    else:  # three turns; an answer, one request behind it and a fork; another beginning
        assert {tuple(sorted(b)) for b in begins} == {("fork", "root", "root", "root")}
        assert metrics[-1]["agent/forks_mean"] == 1 and metrics[-1]["agent/reprompted_share"] > 0
    audit = audit_run(job.run_dir)
    assert audit.claims == dict.fromkeys((*CLAIMS, CUSTODY), "passed"), audit.findings
    assert audit.numbers["custody"]["sessions"] == 16 * STEPS
    for damage, said in (
        (
            lambda s: s.replace('"with_loss": [[', '"with_loss": [[0, 1], [', 1),
            "tokens .* have loss",
        ),
        (lambda s: s[s.index("\n") + 1 :], "custody.sessions of the run's own verdict"),
    ):
        file = job.run_dir / "evidence" / "custody.jsonl"
        before = file.read_text()
        file.write_text(damage(before))
        audit = audit_run(job.run_dir)
        file.write_text(before)
        assert audit.claims[CUSTODY] == "failed"
        assert any(re.search(said, finding.what) for finding in audit.findings), audit.findings

"""Answers that were cut short or tampered with on their way: refused, asked for again, never trained."""

from __future__ import annotations

import json
import shutil

import pytest

from r3train.audit.audit_run import audit_run
from tests.e2e import jobs
from tests.e2e.accounts import (
    audited,
    buffered_samples,
    dumped_samples,
    trained_as_they_were,
    trained_samples,
)
from tests.e2e.live_jobs import output, pointer, running, steps_done, wait_for
from tests.e2e.lying_proxy import DAMAGES, FAR_EXPERT, lying_proxy, Record

pytestmark = pytest.mark.e2e


def test_bad_answers_now_and_then_are_asked_for_again_and_counted(tmp_path, tiny_flags, engine):
    """Every sixth answer is spoiled, in each way there is; the prompt file changes meanwhile."""
    prompts, run_dir = tmp_path / "prompts.jsonl", tmp_path / "run"
    shutil.copy(tiny_flags[tiny_flags.index("--prompt-data") + 1], prompts)
    record = Record(lambda n: DAMAGES[n // 6 % len(DAMAGES)] if n % 6 == 4 else None)
    with lying_proxy(engine, record) as proxy:
        flags = [*tiny_flags, *jobs.R3_FLAGS, *jobs.NO_CANARIES, "--num-rollout", "6"]
        flags += ["--prompt-data", str(prompts)]
        flags += ["--rollout-external-engine-addrs", proxy, "--check-weight-update-equal"]
        flags += ["--r3-check-interval", "2"]
        with running(run_dir, *flags, "--dump-rollouts") as job:
            wait_for(lambda: steps_done(run_dir) >= 1, job, run_dir)
            with prompts.open("a") as file:
                file.write(json.dumps({"prompt": "one more", "label": "x"}) + "\n")
            assert job.wait(timeout=200) == 0, output(run_dir)
    spoiled = record.lies()
    assert len(spoiled) >= 16 and record.kinds() == set(DAMAGES)
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert [m.get("r3/passed") for m in metrics] == [True, True, True, None, True, None]
    assert [m.get("r3/unchecked") for m in metrics] == [None, None, None, True, None, True]
    audit = audit_run(run_dir)
    assert audit.verdict == "passed" and audit.numbers["steps"] == 4
    assert any("of 6 steps 4 were checked" in note for note in audit.notes)
    assert metrics[-1]["faults/bad_answers"] == len(spoiled)
    assert metrics[0]["faults/bad_answers"] < len(spoiled), "counted as they came"
    assert sorted(trained_samples(audited([run_dir]))) == list(range(6 * 16))
    # what came whole is what was trained: each sample was told untouched exactly once
    assert len(record.truths()) == 6 * 16
    # both sides' waits are accounted for
    assert all(0 <= m["perf/train_wait_share"] <= 1 for m in metrics)
    assert all(0 <= m["perf/rollout_idle_share"] <= 1 for m in metrics)
    assert output(run_dir).count("the prompt file has changed since the run began") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoiler, delay_s, got, expected",
    [
        ("routes_far", 0.0, str(FAR_EXPERT), "expert"),
        # slower than a step: found when the update waits for requests, not when training does
        ("cut", 1.0, "the body ended after", "expected"),
    ],
)
def test_answers_that_stay_bad_end_the_job_with_their_cause_and_a_checkpoint(
    spoiler, delay_s, got, expected, tmp_path, tiny_flags, engine
):
    checkpoint = tmp_path / "ck"
    flags = [*tiny_flags, *jobs.R3_FLAGS, *jobs.NO_CANARIES, "--num-rollout", "6"]
    flags += ["--save", str(checkpoint)]
    flags += ["--auto-resume", "--dump-rollouts"]
    first_bad = 40  # in the middle of the third rollout
    record = Record(
        lambda n: spoiler if n >= first_bad else None,
        lambda n: delay_s if n >= first_bad else 0.0,
    )
    with lying_proxy(engine, record) as proxy:
        failed = jobs.run(tmp_path / "failed", *flags, "--rollout-external-engine-addrs", proxy)
    assert failed.code == 1, failed.output
    text = " ".join(failed.output.split())
    assert got in text and expected in text and "max_bad_answers 3" in text
    assert "a checkpoint was saved" in text and "sample " in text
    done = pointer(checkpoint)
    assert 1 <= done == len(failed.metrics()) < 6
    if delay_s:
        assert "perf/published_bytes" not in failed.metrics()[-1], "it failed in the update"
    # no complete sample is lost: each is trained, or in the checkpoint
    kept = buffered_samples(checkpoint, done)
    first = record.lies()[0].at
    complete = {sample for sample, told in record.truths().items() if told.at < first}
    assert len(complete) >= 30 and kept
    assert complete <= set(trained_samples(audited([failed.run_dir]))) | set(kept)
    # and none is generated or trained again
    resumed = jobs.run(tmp_path / "resumed", *flags, "--rollout-external-engine-addrs", engine)
    assert resumed.code == 0, resumed.output
    records = audited([failed.run_dir, resumed.run_dir])
    assert sorted(trained_samples(records)) == list(range(6 * 16))
    assert all(m["r3/passed"] is True for m in resumed.metrics())
    trained_as_they_were(kept, dumped_samples(resumed.run_dir, range(done, 6)))

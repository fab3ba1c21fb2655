"""A server that lies about every second answer: no lie is trained, and the run goes on."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from aiohttp import web

from r3train.families.read_facts import read_hf_facts
from r3train.loop.rollout_file import BUFFER_FILE, read_samples, write_samples
from r3train.audit.audit_run import audit_run
from r3train.routing.wire import decode_routed_experts
from tests.e2e import jobs, lying_proxy
from tests.e2e.accounts import (
    audited,
    buffered_samples,
    dumped_samples,
    trained_as_they_were,
    trained_samples,
)
from tests.e2e.live_jobs import pointer
from tests.e2e.lying_proxy import EVERY_LIE, HARMLESS, SLOW, Record

pytestmark = pytest.mark.e2e

STEPS, PER_STEP = 5, 32


def flags_of(tiny_flags, *more):
    """A job of 5 rollouts of 32 samples, which takes bad answers as they come."""
    return [
        *tiny_flags,
        *jobs.R3_FLAGS,
        *jobs.NO_CANARIES,
        *f"--num-rollout {STEPS} --dump-rollouts".split(),
        *"--n-samples-per-prompt 8 --max-bad-answers 40".split(),
        *more,
    ]


def kinds_in_turn():
    """Every kind; two requests in turn are swapped with one another."""
    kinds = cycle([*EVERY_LIE, "swap", *HARMLESS, SLOW])
    return {n: next(kinds) if n % 2 else None for n in range(20_000)}.get


def is_what_the_server_said(sample, told, shape):
    """True if the trained sample is the answer, to the last bit."""
    asked, said = told.asked, told.truth
    meta, tokens = said["meta_info"], [*asked["input_ids"], *said["output_ids"]]
    scored = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    rows = decode_routed_experts(
        meta["routed_experts"], shape, num_tokens=len(tokens), sample="truth"
    )
    (span,) = meta["weight_versions"]
    return (
        sample.token_ids.tolist() == tokens
        and (sample.rollout_log_probs[sample.prompt_len :] == scored).all()
        and (sample.routed_experts == rows).all()
        and (sample.weight_versions[sample.prompt_len :] == int(span["version"])).all()
        and sample.finish_reason == meta["finish_reason"]["type"]
    )


def test_no_lie_is_trained_and_the_run_goes_on(tmp_path, tiny, tiny_flags, engine):
    shape = read_hf_facts(tiny / "model").route_shape
    record = Record(kinds_in_turn())
    with lying_proxy.lying_proxy(engine, record) as proxy:
        job = jobs.run(
            tmp_path / "run",
            *flags_of(tiny_flags, "--ci-test"),
            "--rollout-external-engine-addrs",
            proxy,
        )
    assert job.code == 0, job.output
    untold = {*EVERY_LIE, *HARMLESS, SLOW} - record.kinds()
    assert not untold, f"{untold} were never told"
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert metrics[-1]["faults/bad_answers"] == len(record.lies()) > STEPS * PER_STEP / 2
    assert audit_run(job.run_dir).verdict == "passed"
    # each sample is the one answer in which the server's own words could be read
    truths, samples = record.truths(), dumped_samples(job.run_dir, range(STEPS))
    assert sorted(samples) == sorted(trained_samples(audited([job.run_dir])))
    assert len(samples) == STEPS * PER_STEP
    false = [
        i for i, sample in samples.items() if not is_what_the_server_said(sample, truths[i], shape)
    ]
    assert not false, f"samples {false} are not what the server said"


def poisoned(path):
    """Put an id outside the vocabulary and a log-prob of 1e30 into two waiting samples; returns their ids."""
    samples, facts = read_samples(path)
    (first, _), (last, _) = samples[0], samples[-1]
    assert first is not last
    first.token_ids[-1] = 1_000_000
    last.rollout_log_probs[-1] = 1e30
    write_samples(path, samples, facts)
    return first.sample_id, last.sample_id


def test_a_redirect_ends_the_run_and_samples_that_no_model_drew_are_generated_again_by_the_next(
    tmp_path, tiny_flags, engine, monkeypatch
):
    """Once such samples were trained from every checkpoint that held them, and ended each start."""
    target = "http://192.0.2.1:9/generate"
    moved = lambda body, answer: web.Response(
        status=307, headers={"Location": target}
    )  # noqa: E731
    monkeypatch.setitem(lying_proxy.RAW, "moved", moved)
    # samples that were answered before wait in the buffer by then
    monkeypatch.setitem(lying_proxy.AFTER_S, "moved", 3.0)

    def invented(answer):
        """Log-probs that could be: only the trainer's own show that they are not."""
        for entry in answer["meta_info"]["output_token_logprobs"]:
            entry[0] -= 3
        return web.json_response(answer)

    monkeypatch.setitem(lying_proxy.HARMLESS, "invented", invented)
    record = Record(
        lambda n: "moved" if n >= 3.5 * PER_STEP else "invented" if n < PER_STEP else None
    )
    checkpoint = tmp_path / "ck"
    flags = flags_of(
        tiny_flags, "--save", str(checkpoint), "--auto-resume", "--r3-recheck-share", "0"
    )
    with lying_proxy.lying_proxy(engine, record) as proxy:
        job = jobs.run(tmp_path / "run", *flags, "--rollout-external-engine-addrs", proxy)
    assert job.code == 1
    text = " ".join(job.output.split())
    assert f"answered 307, a redirect to '{target}'" in text and "a checkpoint was saved" in text
    assert "step 0: train/log_prob_gap_mean is" in " ".join(job.logs().split())
    done = pointer(checkpoint)
    kept = buffered_samples(checkpoint, done)
    false = poisoned(checkpoint / f"iter_{done:07d}" / BUFFER_FILE)
    resumed = jobs.run(tmp_path / "resumed", *flags, "--rollout-external-engine-addrs", engine)
    assert resumed.code == 0, resumed.output
    text = " ".join(resumed.logs().split())
    for sample_id, flaw in zip(false, ("is 1000000, expected 0 to 63", "is 1e+30, expected a num")):
        assert f"sample {sample_id} (prompt" in text and flaw in text
    later = dumped_samples(resumed.run_dir, range(done, STEPS))
    assert all(
        later[i].token_ids.max() < 64 and later[i].rollout_log_probs.max() <= 0 for i in false
    )
    trained_as_they_were({i: kept[i] for i in kept if i not in false}, later)
    records = audited([job.run_dir, resumed.run_dir])
    assert sorted(trained_samples(records)) == list(range(STEPS * PER_STEP))

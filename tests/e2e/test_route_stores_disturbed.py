"""--route-stores when answers come in parts, are spoiled, or stop coming: every row stays where it belongs.

Weights do not move in these jobs (lr 0), so the server itself can say afterwards which rows belong to a
text, whatever updates, segments and second requests its parts came by.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from r3train.routing.wire import decode_routed_experts
from r3train.types import RolloutSample, RouteShape
from tests.e2e import jobs
from tests.e2e.accounts import (
    all_trained_once,
    audited,
    buffered_samples,
    dumped_samples,
    trained_as_they_were,
    trained_samples,
)
from tests.e2e.live_jobs import output, pointer, running, scheduler, steps_done, wait_for
from tests.e2e.lying_proxy import DAMAGES, lying_proxy, Record

pytestmark = pytest.mark.e2e

LAYERS, TOPK, EXPERTS = 4, 2, 8  # of the demo's model
MISSING = 255
STORES = [
    *jobs.R3_FLAGS,
    *jobs.NO_CANARIES,
    *"--route-stores --dump-rollouts --rollout-ignore-eos --lr 0 --lr-warmup-iters 0".split(),
]


def servers_rows(addr: str, sample: RolloutSample) -> np.ndarray:
    """The rows of a whole text, computed anew in one piece: uint8[T-1, L, K]."""
    body = {
        "input_ids": sample.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True},
        "return_routed_experts": True,
        "extra_key": f"alone-{sample.sample_id}",  # nothing of it is taken from a cache
    }
    request = urllib.request.Request(
        f"http://{addr}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        payload = json.load(answer)["meta_info"]["routed_experts"]
    rows = decode_routed_experts(
        payload,
        RouteShape(LAYERS, TOPK, EXPERTS),
        num_tokens=sample.num_tokens + 1,
        sample=str(sample.sample_id),
    )
    return rows[:-1]


def rows_that_differ(addr: str, samples: list[RolloutSample]) -> int:
    """Rows of the samples whose experts are not those that the server gives for the whole text."""
    return sum(
        int((np.sort(s.routed_experts, -1) != np.sort(servers_rows(addr, s), -1)).any((1, 2)).sum())
        for s in samples
    )


def test_answers_in_segments_of_which_some_are_spoiled_leave_every_row_in_its_place(
    tmp_path, tiny_flags, engine
):
    """Three requests per sample, every sixth answer spoiled, in each way there is."""
    run_dir = tmp_path / "run"
    record = Record(lambda n: DAMAGES[n // 6 % len(DAMAGES)] if n % 6 == 4 else None)
    with lying_proxy(engine, record) as proxy:
        job = jobs.run(
            run_dir,
            *tiny_flags,
            *STORES,
            *"--rollout-segment-len 3 --num-rollout 3".split(),
            "--rollout-external-engine-addrs",
            proxy,
            *"--max-bad-answers 9".split(),
        )
    assert job.code == 0, job.output
    spoiled = record.lies()
    assert len(spoiled) >= 16 and record.kinds() == set(DAMAGES)
    metrics = job.metrics()
    assert metrics[-1]["faults/bad_answers"] == len(spoiled)
    assert all(m["r3/passed"] is True and m["perf/route_wire_bytes_rank0"] == 0 for m in metrics)
    all_trained_once([run_dir], 3)
    samples = list(dumped_samples(run_dir, range(3)).values())
    assert len(samples) == 3 * 16 and all(s.response_len == 8 for s in samples)
    assert rows_that_differ(engine, samples) == 0
    # nothing is left of what was spoiled: at the end the stores hold the last batch's rows alone
    last = metrics[-1]
    rows = sum(s.num_tokens for s in dumped_samples(run_dir, range(2, 3)).values())
    assert 0 < last["perf/route_store_held_bytes_max"] <= rows * LAYERS * TOPK
    # the comparison can fail: one row of another token
    wrong = samples[0].routed_experts.copy()
    wrong[1:] = samples[0].routed_experts[:-1]
    object.__setattr__(samples[0], "routed_experts", wrong)
    assert rows_that_differ(engine, samples[:1]) > 0


@pytest.mark.slow
def test_a_job_that_ends_over_bad_answers_keeps_its_buffers_rows_and_resumes_with_stores(
    tmp_path, tiny_flags, engine
):
    checkpoint = tmp_path / "ck"
    flags = [*tiny_flags, *STORES, "--num-rollout", "5", "--save", str(checkpoint), "--auto-resume"]
    flags += ["--save-interval", "1"]  # each reads the buffer's rows from the stores
    first_bad = 40  # in the middle of the third rollout
    record = Record(lambda n: "routes_cut" if n >= first_bad else None)
    with lying_proxy(engine, record) as proxy:
        failed = jobs.run(tmp_path / "failed", *flags, "--rollout-external-engine-addrs", proxy)
    assert failed.code == 1, failed.output
    text = " ".join(failed.output.split())
    assert "max_bad_answers 3" in text and "a checkpoint was saved" in text
    done = pointer(checkpoint)
    kept = buffered_samples(checkpoint, done)
    assert kept and rows_that_differ(engine, list(kept.values())) == 0
    resumed = jobs.run(tmp_path / "resumed", *flags, "--rollout-external-engine-addrs", engine)
    assert resumed.code == 0, resumed.output
    records = audited([failed.run_dir, resumed.run_dir])
    assert sorted(trained_samples(records)) == list(range(5 * 16))
    assert all(m["r3/passed"] is True for m in resumed.metrics())
    trained_as_they_were(kept, dumped_samples(resumed.run_dir, range(done, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_parts_of_several_versions_and_segments_are_put_together_by_reference(
    mode, tmp_path, served_flags, engine
):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *STORES,
        *"--num-rollout 6 --rollout-max-response-len 100 --rollout-segment-len 16".split(),
        *"--max-tokens-per-gpu 2048".split(),
        "--pause-generation-mode",
        mode,
        *"--over-sampling-batch-size 6 --max-weight-staleness 2".split(),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert all(m["r3/passed"] and m["perf/route_wire_bytes_rank0"] == 0 for m in metrics)
    assert sum(m["rollout/spanning_samples"] for m in metrics) > 0
    samples = list(dumped_samples(job.run_dir, range(6)).values())
    assert len(samples) == 6 * 16 and all(s.response_len == 100 for s in samples)
    assert rows_that_differ(engine, samples) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_servers_requests_go_on_from_their_segments_with_the_rows_in_the_stores(
    tmp_path: Path, tiny_flags
):
    run_dir = tmp_path / "run"
    flags = [*tiny_flags, *STORES, "--num-rollout", "6", "--max-engine-restarts", "1"]
    flags += ["--rollout-max-response-len", "300", "--rollout-segment-len", "32"]
    flags += ["--max-tokens-per-gpu", "4096"]
    with running(run_dir, *flags) as job:
        wait_for(lambda: steps_done(run_dir) >= 2, job, run_dir)
        # the next answers have just been asked for, and take about a step
        time.sleep(0.4 * jobs.Job(0, "", run_dir).metrics()[1]["perf/step_s"])
        os.kill(scheduler(job).pid, signal.SIGKILL)
        assert job.wait(timeout=330) == 0, output(run_dir)
    assert "restart 1 of 1" in output(run_dir)
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert all(m["r3/passed"] and m["perf/route_wire_bytes_rank0"] == 0 for m in metrics)
    kept = metrics[-1]["faults/resumed_tokens"]
    assert kept > 0 and kept % 32 == 0
    all_trained_once([run_dir], 6)
    for sample in dumped_samples(run_dir, range(6)).values():
        assert sample.response_len == 300 and len(sample.routed_experts) == sample.num_tokens - 1
        assert (sample.routed_experts != MISSING).all()

"""Lies to canaries, rechecks and control calls: asked again, as a rollout's request is; no step is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from r3train.audit.audit_run import audit_run
from tests.e2e import jobs
from tests.e2e.accounts import audited, trained_samples
from tests.e2e.live_jobs import output, pointer, running, server, steps_done, wait_for
from tests.e2e.lying_proxy import ABORTS, CALL_LIES, lying_proxy, Record

pytestmark = pytest.mark.e2e

STEPS, PER_STEP = 10, 16
BY_DISK = ("--update-weight-transfer-mode", "disk")
# one of these may be made once only
CALLS = {
    "disk": ("canary", "recheck", "model_info", "update_weights_from_disk"),
    "distributed": ("canary", "recheck", "model_info", "begin_weight_update", "end_weight_update"),
}
PAUSES = ("pause_generation", "continue_generation", "flush_cache")


def flags_of(tiny_flags, *more):
    return [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", str(STEPS), *more]


def one_each(calls: tuple[str, ...]) -> Callable[[str], str | None]:
    """Every kind of lie in turn to each of these calls, every second time; the first of each tell the truth."""
    left: dict[str, Iterator[str]] = {
        call: iter((*CALL_LIES, *ABORTS) if call in ("canary", "recheck") else CALL_LIES)
        for call in calls
    }
    seen: Counter[str] = Counter()

    def lie_to(call: str) -> str | None:
        seen[call] += 1
        if call not in left or seen[call] < 6 or seen[call] % 2:
            return None
        return next(left[call], None)

    return lie_to


@pytest.mark.parametrize("mode", ["disk", pytest.param("distributed", marks=pytest.mark.slow)])
def test_one_lie_of_each_kind_to_each_call_costs_no_step(mode, tmp_path, tiny_flags, engine):
    record = Record(lie_to=one_each((*CALLS[mode], *PAUSES)))
    flags = flags_of(tiny_flags, "--update-weight-transfer-mode", mode)
    # in_place: servers are paused at every update
    flags += ["--pause-generation-mode", "in_place", "--rollout-request-timeout-s", "8"]
    with lying_proxy(engine, record) as proxy:
        job = jobs.run(tmp_path / "run", *flags, "--rollout-external-engine-addrs", proxy)
    assert job.code == 0, job.output
    told = set(record.called)
    assert len(told) == len(record.called) >= 30, Counter(call for call, _ in told)
    assert {kind for call, kind in told if call == "canary"} == {*CALL_LIES, *ABORTS}
    for call in CALLS[mode][2:]:
        assert sum(name == call for name, _ in told) >= 2, call
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert all(m["served/passed"] is True for m in metrics)
    assert metrics[-1]["faults/bad_answers"] > 10
    assert audit_run(job.run_dir).verdict == "passed"
    assert sorted(trained_samples(audited([job.run_dir]))) == list(range(STEPS * PER_STEP))


@pytest.mark.slow
def test_a_server_that_aborts_a_seventh_of_all_answers_ends_no_run(tmp_path, tiny_flags, engine):
    calls, aborts = Counter(), ["abort", "abort_503", "abort_500"]

    def lie_to(call: str) -> str | None:
        calls[call] += 1
        aborted = call in ("canary", "recheck") and calls[call] % 7 == 3
        return aborts[calls[call] // 7 % 3] if aborted else None

    record = Record(lambda n: "abort_in_queue" if n % 7 == 3 else None, lie_to=lie_to)
    flags = flags_of(tiny_flags, "--max-bad-answers", "10")
    with lying_proxy(engine, record) as proxy:
        job = jobs.run(tmp_path / "run", *flags, "--rollout-external-engine-addrs", proxy)
    assert job.code == 0, job.output
    assert len(record.lies()) >= STEPS * PER_STEP / 7 - 1
    assert {call for call, _ in record.called} == {"canary", "recheck"}
    metrics = job.metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert metrics[-1]["faults/bad_answers"] >= len(record.lies()) + len(record.called) - 2
    assert audit_run(job.run_dir).verdict == "passed"


@pytest.mark.parametrize(
    "call",
    [
        "canary",
        pytest.param("update_weights_from_disk", marks=pytest.mark.slow),
        pytest.param("model_info", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_fails_for_good_ends_the_run_and_no_trained_step_is_lost(
    call, tmp_path, tiny_flags, engine
):
    updates, checkpoint = Counter(), tmp_path / "ck"

    def lie_to(name: str) -> str | None:
        updates[name] += 1
        fails = updates["update_weights_from_disk"] > 3 if call != name else True
        return "busy_503" if name == call and fails and updates["pause_generation"] > 3 else None

    flags = flags_of(tiny_flags, *BY_DISK, "--save", str(checkpoint), "--auto-resume")
    flags += ["--pause-generation-mode", "in_place", "--rollout-request-timeout-s", "8"]
    with lying_proxy(engine, record := Record(lie_to=lie_to)) as proxy:
        job = jobs.run(tmp_path / "run", *flags, "--rollout-external-engine-addrs", proxy)
    assert job.code == 1, job.output
    assert len(record.called) >= 3 and "answered 503" in " ".join(job.output.split())
    done = pointer(checkpoint)
    # a canary is answered, and its step written, before the next rollout is taken
    assert 2 <= done == len(job.metrics()) + (call != "canary") < STEPS
    resumed = jobs.run(tmp_path / "resumed", *flags, "--rollout-external-engine-addrs", engine)
    assert resumed.code == 0, resumed.output
    records = audited([job.run_dir, resumed.run_dir])
    assert sorted(trained_samples(records)) == list(range(STEPS * PER_STEP))


@pytest.mark.slow
def test_an_http_server_that_stands_still_for_some_seconds_costs_these_alone(tmp_path, tiny_flags):
    """Longer than the 5 s after which uvicorn closes connections that wait, as it does when it wakes."""
    run_dir = tmp_path / "run"
    with running(run_dir, *flags_of(tiny_flags)) as job:
        for step in (1, 3, 5, 7):
            wait_for(lambda: steps_done(run_dir) >= step, job, run_dir)
            time.sleep(0.1 * step)
            process = server(job)
            process.suspend()
            time.sleep(6.5)
            process.resume()
        assert job.wait(timeout=200) == 0, output(run_dir)
    metrics = jobs.Job(0, "", run_dir).metrics()
    assert len(metrics) == STEPS and all(m["r3/passed"] is True for m in metrics)
    assert sorted(trained_samples(audited([run_dir]))) == list(range(STEPS * PER_STEP))

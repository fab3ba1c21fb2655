"""Weight updates in mid-generation on the real server: every row is what its version computed."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from tests import whole_samples
from tests.e2e import jobs
from tests.e2e.sglang_support import checkpoint_tensors, MixedReference, prompt_of, ROUTES
from tests.e2e.sglang_support import wait_until_running

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import BadAnswer, SamplingParams
from r3train.engine.control import EngineControl
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.engine.client import SGLangClient
from r3train.types import RolloutSample, RowClass
from r3train.engine.publish import DistributedPublisher

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(model_server):
    return model_server


class Stranger:
    """Somebody else's request on the same server, on a thread of its own."""

    def __init__(self, addr: str, response_len: int):
        self._addr, self._response_len = addr, response_len
        self.sample: RolloutSample | None = None
        self.error: BadAnswer | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._generate()))

    async def _generate(self) -> None:
        client = SGLangClient([self._addr], routes=ROUTES)
        try:
            self.sample = await whole_samples.generate(
                client,
                prompt_of(99),
                SamplingParams(self._response_len, ignore_eos=True),
                sample_id=0,
                group_id=0,
                exact_version=False,
            )
        except BadAnswer as error:
            self.error = error
        await client.aclose()

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._thread.join()


def spanning_samples(
    server,
    models,
    mode: str,
    flush: bool,
    *,
    routes: bool = True,
    shared: bool = False,
    beside: Stranger | None = None,
) -> list[RolloutSample]:
    """Two versions' weights (b, then a, then b), each published while requests run."""
    in_flight = 12
    expected = ROUTES if routes else None
    with EngineControl([server.addr]) as control:
        control.require_settings(exact_boundaries=True)
        control.update_weights_from_disk(str(models[0]), weight_version=0)
        publisher = DistributedPublisher(
            control, bucket_bytes=1 << 20, flush_cache=flush and mode != "in_place"
        )
        producer = Producer(
            RolloutSection(
                rollout_batch_size=2,
                n_samples_per_prompt=2,
                num_rollout=3,
                rollout_max_response_len=400,
                max_weight_staleness=2,
                rollout_max_concurrency=in_flight,
                pause_generation_mode=mode,
            ),
            lambda: SGLangClient(
                control.members,
                routes=expected,
                shared_servers=shared,
                cache_per_version=flush and mode == "in_place",
            ),
            prompt_of,
            RequestSettings(SamplingParams(400, ignore_eos=True)),
        )
        with beside or nullcontext(), producer:
            for version in (1, 2):
                tokens = checkpoint_tensors(models[version % 2])
                others = beside is not None and version == 1
                wait_until_running(server.addr, in_flight + others)
                with producer.quiesced():
                    publisher.publish(tokens.items(), version=version)
                    producer.set_version(version)
            groups = producer.next_batch(0)
        publisher.close()
    return [sample for group in groups for sample, _ in group]


@pytest.mark.parametrize(
    "mode, flush", [("in_place", True), ("abort", True), ("abort", False), ("retract", True)]
)
def test_each_row_is_of_the_forward_under_the_weights_of_its_token(mode, flush, server, models):
    """Rows and log-probs; retract, which no replay goes with, has log-probs only."""
    samples = spanning_samples(server, models, mode, flush, routes=mode != "retract")
    reference = MixedReference(models)
    spanned = 0
    for sample in samples:
        assert sample.response_len == 400
        versions = sample.weight_versions[sample.prompt_len :]
        spanned += len(np.unique(versions)) == 3
        # what the server did: after a flush all is rechecked, else old KV is built upon
        log_probs, routes = reference(
            sample.token_ids, sample.prompt_len, versions, keep_kv=mode == "in_place" or not flush
        )
        if mode == "retract":
            assert sample.routed_experts is None
        else:
            np.testing.assert_array_equal(
                np.sort(sample.routed_experts, -1), np.sort(routes, -1), str(sample.sample_id)
            )
        np.testing.assert_allclose(
            sample.rollout_log_probs[sample.loss_mask], log_probs[sample.loss_mask], atol=1e-3
        )
        if mode != "retract":
            # where newer weights went on after an abort, they prefilled the row; all others were decoded
            again = mode == "abort" and np.diff(versions) > 0
            of_answer = np.where(again, RowClass.PREFILLED_AGAIN, RowClass.DECODED)
            expected = [RowClass.PREFILLED, *np.broadcast_to(of_answer, 399), RowClass.FILLED]
            assert sample.row_classes[sample.prompt_len - 1 :].tolist() == expected
            of_prompt = sample.row_classes[: sample.prompt_len - 1].tolist()
            assert of_prompt == sorted(of_prompt, reverse=True), "from the cache, then prefilled"
            assert set(of_prompt) <= {RowClass.CACHED, RowClass.PREFILLED}
        # the check can fail: a boundary one token off does not describe what came back
        change = int(np.flatnonzero(np.diff(versions))[0])
        versions[change] = versions[change + 1]
        shifted, _ = reference(
            sample.token_ids, sample.prompt_len, versions, keep_kv=mode == "in_place" or not flush
        )
        assert abs(shifted - sample.rollout_log_probs)[sample.loss_mask].max() > 1e-3
    assert spanned, "no sample was in mid-generation at both updates"


@pytest.mark.parametrize("shared", [True, False])
def test_an_abort_on_a_shared_server_reaches_its_own_requests_alone(shared, server, models):
    """On a server of its own (``shared`` False) everything is aborted: the check can fail."""
    stranger = Stranger(server.addr, 500)
    samples = spanning_samples(server, models, "abort", False, shared=shared, beside=stranger)
    # its own were aborted in mid-generation, and gone on with
    assert all(sample.response_len == 400 for sample in samples)
    assert any(len(np.unique(s.weight_versions[s.loss_mask])) == 3 for s in samples)
    if not shared:  # the stranger did not abort it, so it would ask again
        assert "nobody here aborted it" in str(stranger.error)
        return
    # the stranger's came to its end, which the update waited for, and nobody else's came back
    got = stranger.sample
    assert set(got.weight_versions[got.loss_mask].tolist()) == {0}
    assert (got.finish_reason, got.response_len) == ("length", 500)


@pytest.mark.parametrize("mode", ["in_place", pytest.param("abort", marks=pytest.mark.slow)])
def test_a_job_trains_on_rollouts_that_span_updates_with_equal_fingerprints(
    mode, tmp_path, served_flags
):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 4".split(),
        "--pause-generation-mode",
        mode,
        *"--max-weight-staleness 2 --rollout-max-response-len 300 --rollout-ignore-eos".split(),
        *"--over-sampling-batch-size 6 --rollout-max-concurrency 8".split(),
        *"--pipeline-model-parallel-size 2 --expert-model-parallel-size 1".split(),
        "--check-weight-update-equal",
    )
    assert job.code == 0, job.output
    # each pipeline stage sent its weights in a group of its own, and the servers hold those of all
    groups = re.findall(r"rank (\d) .*weight-update group (\w+):", job.logs())
    assert [rank for rank, _ in groups] == ["0", "1"] and len({name for _, name in groups}) == 2
    metrics = job.metrics()
    assert len(metrics) == 4 and all(m["r3/passed"] is True for m in metrics)
    assert sum(m["rollout/spanning_samples"] for m in metrics) > 0
    assert all(m["rollout/staleness_max"] <= 2 for m in metrics)
    assert all(m["r3/rows_native"] == m["r3/duplicate_rows"] == 0 for m in metrics)
    if mode == "abort":
        assert sum(m["rollout/resumed"] for m in metrics) > 0
    every_prompt_has_one_fate(job, 16)


@pytest.mark.slow
def test_a_job_without_r3_trains_on_rollouts_that_updates_retracted(tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *"--num-rollout 3 --pause-generation-mode retract --max-weight-staleness 2".split(),
        *"--rollout-max-response-len 300 --rollout-ignore-eos".split(),
        # half of what the staleness allows: the other half runs while the first is trained
        *"--rollout-max-concurrency 24 --check-weight-update-equal".split(),
    )
    assert job.code == 0, job.output
    metrics = job.metrics()
    assert len(metrics) == 3 and sum(m["rollout/spanning_samples"] for m in metrics) > 0
    assert all(m["rollout/staleness_max"] <= 2 for m in metrics)
    assert all(m["served/passed"] for m in metrics)
    every_prompt_has_one_fate(job, 12)


def every_prompt_has_one_fate(job: jobs.Job, groups: int) -> None:
    outcomes = [jobs.json.loads(line) for line in (job.run_dir / "outcomes.jsonl").open()]
    trained = [o["group_id"] for o in outcomes if o["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == groups
    fates = [o["group_id"] for o in outcomes]
    assert sorted(fates) == list(range(len(fates))), "every prompt sampled has one fate"

"""Answers rechecked by the real server: rows and log-probs are right, and every fault shows."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.e2e.sglang_support import checkpoint_tensors, NUM_LAYERS, prompt_of, ROUTES
from tests.e2e.sglang_support import wait_until_running

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.publish import DistributedPublisher
from r3train.engine.server import SGLangServer
from r3train.generation import stitch
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.proof.recheck_verdict import (
    compare,
    compare_rollout,
    judge_recheck,
    measured_noise,
    recheck_failures,
    RecheckRecord,
)
from r3train.proof.suspicion import Suspicions
from r3train.cpu.device import prepare_device
from r3train.types import Prompt, Rechecked, RolloutSample

prepare_device()
from tests.oracle.planted import MUTATIONS, planted_by  # noqa: E402

pytestmark = pytest.mark.e2e
LAYERS = range(1, NUM_LAYERS + 1)
BUGS = [
    *((bug, "drain") for bug in planted_by("tests/e2e/test_recheck.py")),
    (MUTATIONS["answer_without_second_stage"], "abort"),
]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    # a text of more than 32 tokens is computed in several chunks
    with SGLangServer(
        models[0],
        log,
        return_routed_experts=True,
        start_timeout_s=200,
        server_args={"chunked_prefill_size": 32},
    ) as server:
        yield server


@pytest.fixture
def control(server, models):
    """Every test starts from model a, version 0, and from an empty cache."""
    with EngineControl([server.addr]) as control:
        control.update_weights_from_disk(str(models[0]), weight_version=0)
        yield control


def audited(
    server, models, control, mode: str, num_rollout: int = 3
) -> tuple[list[RecheckRecord], list[RolloutSample], int]:
    """Rollouts with every sample rechecked, and an update to other weights after each.

    Returns the comparisons, the samples, and the number of samples that were missed.
    """
    rollout = RolloutSection(
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        num_rollout=num_rollout,
        rollout_max_response_len=60,
        max_weight_staleness=1,
        pause_generation_mode=mode,
    )
    publisher = DistributedPublisher(control, bucket_bytes=1 << 20, flush_cache=mode != "in_place")

    def client() -> SGLangClient:
        return SGLangClient(
            control.members,
            routes=ROUTES,
            cache_per_version=mode == "in_place",
        )

    records, samples, missed = [], [], 0
    sampling = SamplingParams(60, ignore_eos=True)

    def same_prompts(group: int) -> Prompt:
        return prompt_of(group % 2)

    with Producer(
        rollout, client, same_prompts, RequestSettings(sampling), recheck_share=1.0
    ) as producer:
        for rollout_id in range(num_rollout):
            groups = producer.next_batch(rollout_id)
            batch = [sample for group in groups for sample, _ in group]
            rechecked = producer.rechecked()
            records += compare_rollout(
                rollout_id,
                rechecked,
                batch,
                lambda s: s,
                list(LAYERS),
                log_probs=True,
                dtype="float32",
            )
            samples += batch
            missed += rechecked.missed
            if mode != "drain" and rollout_id == 1:
                # the last rollout has begun: this update comes amid its answers
                wait_until_running(server.addr, 3, then_s=0.05)
            with producer.quiesced():
                version = rollout_id + 1
                publisher.publish(checkpoint_tensors(models[version % 2]).items(), version=version)
                producer.set_version(version)
    publisher.close()
    return records, samples, missed


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort"])
def test_every_row_and_log_prob_of_right_answers_is_computed_again(mode, server, models, control):
    records, samples, missed = audited(server, models, control, mode)
    assert len(samples) == 24 and missed < 12
    judged = judge_recheck(records, missed, Suspicions(1.0, calibrating=0))
    assert (judged.verdict, judged.failures) == ("passed", [])
    # float32 on a CPU: prefill and decode choose the same experts in every row
    assert all(r.noise.rows_seldom_differ and r.noise.decoded.rows > 400 for r in records)
    assert sum(r.decoded.share + r.prefilled.share for r in records) == 0
    assert max(r.log_prob_off_max for r in records) < 1e-4
    assert sum(r.num_rows for r in records if r.part == "whole") > 500
    # what an update interrupted: from the last version's first row on, or the prompt before it
    other = {"drain": set(), "abort": {"last"}, "in_place": {"prompt"}}[mode]
    assert {r.part for r in records} == {"whole", *other}


@pytest.mark.parametrize("bug, mode", BUGS, ids=lambda value: getattr(value, "name", value))
def test_a_planted_bug_between_server_and_sample_is_found(bug, mode, server, models, control):
    with bug.patch(None, None):
        records, _, missed = audited(server, models, control, mode)
    # the samples themselves are compared: nothing was wrong when the noise was measured
    sound_start = bug.name != "answer_wrong_from_the_start"
    assert {record.noise.rows_seldom_differ for record in records} == {sound_start}
    part = "last" if mode == "abort" else "whole"
    wrong = [r for r in records if r.part == part]
    shares = sorted(max(r.decoded.share, r.prefilled.share) for r in wrong)
    print(
        f"{bug.name} {mode}: {shares[0]:.0%} to {shares[-1]:.0%} of the rows of {len(wrong)} parts"
    )
    # gross: a run ends at its first step with the bug
    judged = judge_recheck(records, missed, Suspicions())
    assert judged.verdict == "failed" and part in {f.stage for f in judged.failures}


@pytest.mark.slow
def test_bfloat16_is_judged_against_its_own_noise_and_a_bug_is_found_in_it(models, tmp_path):
    bug = MUTATIONS["answer_without_second_stage"]
    log = tmp_path / "sglang.log"
    with SGLangServer(
        models[0], log, dtype="bfloat16", return_routed_experts=True, start_timeout_s=200
    ) as server:
        with EngineControl([server.addr]) as control:
            control.update_weights_from_disk(str(models[0]), weight_version=0)
            records, _, missed = audited(server, models, control, "drain")
            judged = judge_recheck(records, missed, Suspicions())
            assert (judged.verdict, judged.failures) == ("passed", [])
            # far above that of float32, and no rounding of a fault
            assert all(1e-4 < r.noise.log_prob_off < 0.1 for r in records)
            differ = max(r.decoded.share for r in records)
            control.update_weights_from_disk(str(models[0]), weight_version=0)
            with bug.patch(None, None):
                records, _, missed = audited(server, models, control, "drain")
    judged = judge_recheck(records, missed, Suspicions())
    print(f"sound: at most {differ:.1%} of the rows; {len(judged.failures)} gross failures")
    assert judged.verdict == "failed" and judged.failures


def draw(server, *, seeds=range(4), tokens: int = 60) -> list[RolloutSample]:
    """Samples of version 0."""

    async def all_of_them() -> list[RolloutSample]:
        client = SGLangClient([server.addr], routes=ROUTES)
        sampling = SamplingParams(tokens, ignore_eos=True)

        async def one(seed: int) -> RolloutSample:
            sample = stitch.begin(prompt_of(seed), sample_id=seed, group_id=seed)
            request = stitch.next_request(sample, sampling, weight_version=0)
            return stitch.finished(stitch.extend(sample, await client.generate(request)))

        try:
            return list(await asyncio.gather(*map(one, seeds)))
        finally:
            await client.aclose()

    return asyncio.run(all_of_them())


def again(server, samples: list[RolloutSample], **changes) -> list[Rechecked]:
    """The samples rechecked; changes: of the request's body."""

    async def all_of_them() -> list[Rechecked]:
        client = SGLangClient([server.addr], routes=ROUTES)
        call = client.http.call

        async def changed(server, path, body=None, **how):
            if path == "/generate":
                body = {**body, **changes}
                body = {key: value for key, value in body.items() if value is not None}
            return await call(server, path, body, **how)

        client.http.call = changed
        sampling = SamplingParams(1000)
        try:
            requests = [
                stitch.next_request(sample, sampling, weight_version=0) for sample in samples
            ]
            return [
                await client.recheck(replace(request, rows_start=0, max_new_tokens=0), "whole", 0)
                for request in requests
            ]
        finally:
            await client.aclose()

    return asyncio.run(all_of_them())


def test_answers_of_other_weights_under_the_same_label_are_found(server, models, control):
    samples = draw(server)
    right = again(server, samples)
    noise = measured_noise(zip(samples, right), list(LAYERS), "float32")[0]
    assert noise.rows_seldom_differ
    control.update_weights_from_disk(str(models[1]), weight_version=0)
    shares = []
    for sample, stale in zip(samples, again(server, samples), strict=True):
        record = compare(0, sample, stale, noise, list(LAYERS), log_probs=True)
        shares.append(record.decoded.share)
        suspicions = Suspicions(1.0, calibrating=0)
        assert judge_recheck([record], 0, suspicions).verdict == "failed"
    print(f"other weights: {min(shares):.0%} to {max(shares):.0%} of the decoded rows differ")
    assert min(shares) > 0.2, shares


def test_a_server_that_holds_another_version_than_the_sample_is_found(server, models, control):
    samples = draw(server, seeds=[0])
    (right,) = again(server, samples)
    noise = measured_noise([(samples[0], right)], list(LAYERS), "float32")[0]
    control.update_weight_version(7)
    (other,) = again(server, samples)
    record = compare(0, samples[0], other, noise, list(LAYERS), log_probs=True)
    (failure,) = recheck_failures(record)
    assert "weight version" in str(failure) and (failure.got, failure.expected) == (7, 0)


def test_without_a_key_of_its_own_a_text_would_get_the_rows_that_are_cached(
    server, models, control
):
    """Every chunk after the first would be given the rows that it is to be compared with."""
    samples = draw(server, seeds=range(2))
    control.update_weights_from_disk(str(models[1]), weight_version=0, flush_cache=False)
    blind = again(server, samples, extra_key=None)
    keyed = again(server, samples)
    for sample, cached, own in zip(samples, blind, keyed, strict=True):
        same = (np.sort(cached.rows, -1) == np.sort(sample.routed_experts, -1)).all(-1)
        other = (np.sort(own.rows, -1) == np.sort(sample.routed_experts, -1)).all(-1)
        assert same.mean() > 0.5 > other.mean()

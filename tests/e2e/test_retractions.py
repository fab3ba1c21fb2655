"""Requests that the real server retracts under KV pressure, through the production client and producer.

A pool of 400 tokens, 8 requests in flight that need 672, and a weight update while they run.
"""

from __future__ import annotations

import json
import time
import urllib.request

import numpy as np
import pytest
from tests.e2e.sglang_support import (
    checkpoint_tensors,
    MixedReference,
    NUM_LAYERS,
    prompt_of,
    ROUTES,
)

from r3train.config.rollout_settings import RolloutSection
from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.engine.publish import DistributedPublisher
from r3train.engine.server import SGLangServer
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.proof.recheck_verdict import compare_rollout, recheck_failures, RecheckRecord
from r3train.types import RolloutSample, RowClass

pytestmark = pytest.mark.e2e
POOL, IN_FLIGHT, PROMPT, RESPONSE, ROLLOUTS = 400, 8, 24, 60, 3


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    args = {"max_total_tokens": POOL, "schedule_conservativeness": 0.01}
    with pytest.MonkeyPatch.context() as patch:
        # the server counts on 8 more tokens per request, and takes more requests than it can finish
        patch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        server = SGLangServer(
            models[0], log, return_routed_experts=True, start_timeout_s=200, server_args=args
        )
        with server:
            yield server


def wait_until_running(addr: str, count: int) -> None:
    """Until so many requests are being decoded; a few seconds, for the others may be done already."""
    deadline = time.monotonic() + 3
    while True:
        with urllib.request.urlopen(f"http://{addr}/v1/loads?include=core", timeout=10) as answer:
            (load,) = json.load(answer)["loads"]
        if load["num_running_reqs"] >= count or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def rollouts_under_pressure(
    server, models, mode: str, policy: str
) -> tuple[list[RolloutSample], int]:
    """All samples of a run with an update in the middle of each rollout; answers retracted."""
    with EngineControl([server.addr]) as control:
        assert control.pool_tokens() == POOL
        control.update_weights_from_disk(str(models[0]), weight_version=0)
        publisher = DistributedPublisher(
            control, bucket_bytes=1 << 20, flush_cache=mode != "in_place"
        )
        rollout = RolloutSection(
            rollout_batch_size=IN_FLIGHT,
            n_samples_per_prompt=1,
            num_rollout=ROLLOUTS,
            rollout_max_response_len=RESPONSE,
            max_weight_staleness=1,
            rollout_max_concurrency=IN_FLIGHT,
            pause_generation_mode=mode,
            retraction_policy=policy,
        )
        assert rollout.pool_needed(PROMPT) > POOL > rollout.pool_needed(PROMPT) / 2
        samples: list[RolloutSample] = []
        producer = Producer(
            rollout,
            lambda: SGLangClient(
                control.members,
                routes=ROUTES,
                cache_per_version=mode == "in_place",
            ),
            prompt_of,
            RequestSettings(SamplingParams(RESPONSE, ignore_eos=True)),
        )
        with producer:
            for step in range(ROLLOUTS):
                samples += [sample for group in producer.next_batch(step) for sample, _ in group]
                if step + 1 < ROLLOUTS:
                    wait_until_running(server.addr, IN_FLIGHT // 2)
                    tensors = checkpoint_tensors(models[(step + 1) % 2])
                    with producer.quiesced():
                        publisher.publish(tensors.items(), version=step + 1)
                        producer.set_version(step + 1)
            retracted = producer.stats()["retracted_answers"]
        publisher.close()
    return samples, retracted


def of_their_forwards(samples: list[RolloutSample], models, *, keep_kv: bool) -> list[bool]:
    """Of each sample: its rows and log-probs are those of the forwards that its versions claim."""
    reference = MixedReference(models)
    verdicts = []
    for sample in samples:
        versions = sample.weight_versions[sample.prompt_len :]
        log_probs, routes = reference(
            sample.token_ids, sample.prompt_len, versions, keep_kv=keep_kv
        )
        gap = np.abs(sample.rollout_log_probs - log_probs)[sample.loss_mask].max()
        same = np.sort(sample.routed_experts, -1) == np.sort(routes, -1)
        verdicts.append(bool(same.all() and gap < 1e-3))
    return verdicts


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort", "retract"])
def test_no_row_of_a_retracted_request_is_trained(mode, server, models):
    samples, retracted = rollouts_under_pressure(server, models, mode, "regenerate")
    assert retracted > 0, "the pool was large enough"
    assert [s.sample_id for s in samples] == list(range(IN_FLIGHT * ROLLOUTS))
    assert all(s.num_retractions == 0 and s.response_len == RESPONSE for s in samples)
    assert all(of_their_forwards(samples, models, keep_kv=mode == "in_place"))


def test_accepted_requests_have_rows_of_weights_that_their_tokens_do_not_claim(server, models):
    """Without it the test above could not fail."""
    for _ in range(3):  # an update may miss the requests that are retracted after it
        samples, retracted = rollouts_under_pressure(server, models, "in_place", "accept")
        verdicts = of_their_forwards(samples, models, keep_kv=True)
        wrong = [s for s, right in zip(samples, verdicts, strict=True) if not right]
        assert retracted == sum(s.num_retractions > 0 for s in samples) > 0
        assert all(s.num_retractions for s in wrong), "a request that was not retracted is wrong"
        for s in samples:
            again = s.row_classes[:-1] == RowClass.PREFILLED_AGAIN
            assert again.all() if s.num_retractions else not again.any()
        if wrong:
            break
    # tokens of both versions, and rows of the prompt that the first of them did not compute
    assert wrong and all(len(np.unique(s.weight_versions[s.loss_mask])) > 1 for s in wrong)


def rechecked_under_pressure(server, models) -> tuple[list[RolloutSample], list[RecheckRecord]]:
    """A rollout whose retracted answers are accepted, with an update in its middle, rechecked."""
    rollout = RolloutSection(
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        num_rollout=1,
        rollout_max_response_len=90,
        rollout_max_concurrency=8,
        pause_generation_mode="in_place",
        retraction_policy="accept",
    )
    with EngineControl([server.addr]) as control:
        control.update_weights_from_disk(str(models[0]), weight_version=0)
        publisher = DistributedPublisher(control, bucket_bytes=1 << 20, flush_cache=False)

        def client() -> SGLangClient:
            return SGLangClient(
                control.members,
                routes=ROUTES,
                cache_per_version=True,
            )

        sampling = SamplingParams(90, ignore_eos=True)
        with Producer(
            rollout, client, prompt_of, RequestSettings(sampling), recheck_share=1.0
        ) as producer:
            while producer.stats()["in_flight"] < 8:  # the noise is measured before
                time.sleep(0.01)
            wait_until_running(server.addr, 3)
            time.sleep(0.02)
            with producer.quiesced():
                publisher.publish(checkpoint_tensors(models[1]).items(), version=1)
                producer.set_version(1)
            groups = producer.next_batch(0)
            rechecked, stats = producer.rechecked(), producer.stats()
        publisher.close()
    samples = [sample for group in groups for sample, _ in group]
    layers = list(range(1, NUM_LAYERS + 1))
    assert stats["retracted_answers"] > 0, stats
    return samples, compare_rollout(
        0, rechecked, samples, lambda s: s, layers, log_probs=True, dtype="float32"
    )


def test_rows_of_retracted_answers_are_found_where_they_are_accepted(server, models):
    for _ in range(5):  # an update may miss the requests that are retracted after it
        samples, records = rechecked_under_pressure(server, models)
        retracted = {s.sample_id for s in samples if s.num_retractions}
        failed = [r for r in records if recheck_failures(r)]
        assert {r.sample_id for r in failed} <= retracted
        if failed:
            break
    # prompt rows of the newer weights, under tokens that claim the older
    assert {r.part for r in failed} == {"prompt"}
    print(f"accept: {len(failed)} samples, {[f'{r.prefilled.share:.0%}' for r in failed]}")
    assert all(r.prefilled.share > 0.5 for r in failed), failed

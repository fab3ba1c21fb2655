"""Answers that a server retracted under KV pressure: thrown away and asked for again, or accepted."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from tests.fakes.server import RETRACTED, SimulatedEngine, prompt_for, rollout_section

from r3train.algo.reward_stats import group_stats
from r3train.engine.backend import EngineError, SamplingParams
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings, Episodes
from r3train.loop.step_metrics import rollout_metrics, source_metrics
from r3train.types import TrainSample

pytestmark = pytest.mark.usefixtures("virtual_clock")


def producer_of(engine, *, segment_len=None, pool_facts=None, **settings):
    rollout = rollout_section(**{"rollout_max_concurrency": 8, **settings})
    return Producer(
        rollout,
        lambda: engine,
        prompt_for,
        RequestSettings(SamplingParams(20), segment_len=segment_len, pool_facts=pool_facts),
    )


def every_seventh(n):
    return n % 7 == 1


def trained(producer, steps=1):
    return [s for step in range(steps) for g in producer.next_batch(step) for s, _ in g]


@pytest.mark.parametrize("segment_len", [None, 6])
def test_no_token_of_a_retracted_answer_is_trained_and_each_is_counted(segment_len):
    engine = SimulatedEngine(length=lambda _: 18, retracted=every_seventh)
    with producer_of(engine, segment_len=segment_len) as producer:
        samples = trained(producer)
        stats = producer.stats()
    for sample in samples:
        assert sample.response_len == 18 and sample.finish_reason == "stop"
        assert RETRACTED not in sample.token_ids and sample.num_retractions == 0
        assert len(sample.routed_experts) == sample.num_tokens - 1
        assert sum(len(rows) for _, rows in sample.decoded) in (0, sample.num_tokens - 1)
    assert stats["retracted_answers"] == sum(map(every_seventh, range(engine.answered))) > 0


def test_only_the_answer_that_was_retracted_is_asked_for_again():
    """Earlier segments came with rows of their own: they stay, and nothing is asked for twice."""
    engine = SimulatedEngine(length=lambda _: 18, retracted=lambda n: n == 1)
    with producer_of(
        engine, segment_len=6, rollout_max_concurrency=1, n_samples_per_prompt=1
    ) as producer:
        (sample, _) = trained(producer)
    asked = [tokens for sample_id, _, tokens in engine.asked if sample_id == 0]
    assert asked == [0, 6, 6, 12]
    assert sample.response_len == 18 and RETRACTED not in sample.token_ids


def test_only_the_turn_that_was_retracted_is_played_again():
    async def two_turns(generate, prompt, *, sampling, sample_id):
        return [await generate(await generate(None, 6), 6)], 0.0

    engine = SimulatedEngine(length=lambda _: 12, retracted=lambda n: n == 1)
    rollout = rollout_section(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=1)
    with Producer(
        rollout,
        lambda: engine,
        prompt_for,
        RequestSettings(SamplingParams(20)),
        episodes=Episodes(make=lambda _: two_turns),
    ) as producer:
        (sample,) = trained(producer)
    assert [tokens for _, _, tokens in engine.asked] == [0, 6, 6]
    assert sample.response_len == 12 and RETRACTED not in sample.token_ids


def test_accepted_answers_are_counted_and_trained_as_they_are():
    engine = SimulatedEngine(retracted=every_seventh)
    with producer_of(engine, retraction_policy="accept") as producer:
        samples = trained(producer)
        counts = producer.stats()
    accepted = [s for s in samples if s.num_retractions]
    source_counts = source_metrics(counts, {})
    assert source_counts["rollout/retracted"] >= len(accepted)
    assert source_counts["rollout/spec_accept_rate"] == pytest.approx(1 / 3)  # as the engine says
    groups = group_stats(np.zeros((2, 2)))
    train_samples = [TrainSample(s, 0.0, np.zeros(s.num_tokens, np.float32)) for s in samples]
    metrics = rollout_metrics(0, groups, train_samples)
    assert metrics["rollout/retracted_samples"] == len(accepted)
    assert accepted and all(RETRACTED in s.token_ids for s in accepted)
    assert all(RETRACTED not in s.token_ids for s in samples if not s.num_retractions)


def test_three_retractions_of_one_request_in_a_row_end_the_run_with_the_pools_size_and_the_need():
    engine = SimulatedEngine(retracted=lambda n: n in (0, 2, 3, 4))
    room = rollout_section(rollout_max_concurrency=1, rollout_max_response_len=1300)
    with producer_of(
        engine,
        rollout_max_concurrency=1,
        rollout_max_response_len=1300,
        pool_facts=room.pool_facts(1234, longest_prompt=200),
    ) as producer:
        message = (
            r"sample 1 .*retracted by its server 3 times in a row: the servers' KV pools hold 1,234"
            r" tokens, and 1 requests in flight of up to 1,500 tokens need 1,500; lower"
            " --rollout-max-concurrency, or give the servers more memory .*$"
        )
        with pytest.raises(EngineError, match=message):
            trained(producer)
    assert [sample_id for sample_id, _, _ in engine.asked[:5]] == [0, 0, 1, 1, 1]


def test_an_answer_that_is_kept_ends_a_row_of_retractions():
    """Each segment of a rollout is retracted twice, six times in all."""
    engine = SimulatedEngine(length=lambda _: 18, retracted=lambda n: n % 3 != 2)
    settings = {"rollout_max_concurrency": 1, "n_samples_per_prompt": 1, "rollout_batch_size": 1}
    with producer_of(engine, segment_len=6, **settings) as producer:
        (sample,) = trained(producer)
        assert producer.stats()["retracted_answers"] >= 6
    asked = [tokens for sample_id, _, tokens in engine.asked if sample_id == 0]
    assert asked == [0] * 3 + [6] * 3 + [12] * 3
    assert sample.response_len == 18 and RETRACTED not in sample.token_ids


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort", "retract"])
def test_a_request_is_asked_for_again_with_the_weights_that_the_servers_hold_by_then(mode):
    """An update passes while the answers of the second rollout are under way, which were retracted."""
    engine = SimulatedEngine(length=lambda _: 20, tick_s=0.02, retracted=lambda n: 4 <= n < 8)
    with producer_of(
        engine, pause_generation_mode=mode, rollout_max_concurrency=4, max_weight_staleness=2
    ) as producer:
        trained(producer)
        time.sleep(0.05)
        with producer.quiesced():
            if mode in ("drain", "abort"):
                assert not engine.running
            engine.version = 1
            producer.set_version(1)
        samples = [s for g in producer.next_batch(1) for s, _ in g]
        retracted = producer.stats()["retracted_answers"]
    assert len(samples) == 4 and retracted == 4
    for sample in samples:
        versions = sample.weight_versions[sample.loss_mask]
        assert sample.response_len == 20 and RETRACTED not in sample.token_ids
        # a draining update waits for the second answer too
        assert np.unique(versions).tolist() == [0 if mode == "drain" else 1]


class AnswersAtThePause(SimulatedEngine):
    """Every running request comes to its end while the servers are told to pause."""

    async def pause_generation(self, mode="in_place"):
        self.calls.append(f"pause {mode}")


def test_a_retracted_answer_that_comes_in_a_pause_is_asked_for_again_after_it():
    engine = AnswersAtThePause(length=lambda _: 20, tick_s=0.02, retracted=lambda n: 4 <= n < 8)
    with producer_of(
        engine,
        pause_generation_mode="in_place",
        rollout_max_concurrency=4,
        max_weight_staleness=2,
    ) as producer:
        trained(producer)
        time.sleep(0.05)
        with producer.quiesced():
            asked = len(engine.asked)
            deadline = time.monotonic() + 20
            while engine.answered < 8 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            assert engine.answered == 8 and len(engine.asked) == asked
            engine.version = 1
            producer.set_version(1)
        samples = [s for g in producer.next_batch(1) for s, _ in g]
    assert all(np.unique(s.weight_versions[s.loss_mask]).tolist() == [1] for s in samples)


class FewTokensFirst(SimulatedEngine):
    """At the end of each answer says that it was retracted if four others were ahead of it.

    So does SGLang where four requests fit: it retracts the request with the fewest tokens.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.order = []  # requests under way, in the order in which they came
        self.ahead: dict[int, list[int]] = {}  # sample id -> those ahead of each request of it

    async def generate(self, request):
        ahead = len(self.order)
        self.order.append(request.sample_id)
        self.ahead.setdefault(request.sample_id, []).append(ahead)
        try:
            segment = await super().generate(request)
        finally:
            self.order.remove(request.sample_id)
        return replace(segment, num_retractions=int(ahead >= 4))


def test_a_request_that_was_retracted_waits_for_room_and_nothing_new_goes_before_it():
    """Places for 8 requests where 4 fit, of unequal lengths: without the wait this run would end."""
    engine = FewTokensFirst(slow=lambda sample_id: 1 + sample_id % 3)
    with producer_of(
        engine, rollout_batch_size=12, num_rollout=3, rollout_max_concurrency=8
    ) as producer:
        samples = trained(producer, steps=2)
        assert producer.stats()["retracted_answers"] > 5
    assert len(samples) == 48 and all(s.num_retractions == 0 for s in samples)
    tries = [ahead for ahead in engine.ahead.values() if len(ahead) > 1]
    assert tries and all(len(ahead) == 2 and ahead[1] < 4 for ahead in tries)


def test_rollouts_that_wait_for_room_go_on_one_by_one_and_after_a_pause():
    """All places are taken by requests that were retracted."""
    engine = SimulatedEngine(length=lambda _: 20, tick_s=0.002, retracted=lambda n: n < 4)
    with producer_of(
        engine, pause_generation_mode="in_place", rollout_max_concurrency=4
    ) as producer:
        with producer.quiesced():
            time.sleep(0.1)
        assert len(trained(producer)) == 4
    assert producer.failure is None

"""Answers asked for in segments, and what a failing producer leaves for its checkpoint."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from tests.fakes.server import SimulatedEngine, prompt_for, rollout_section

from r3train.engine.backend import BadAnswer, SamplingParams
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.generation.scheduler import GroupScorer


def producer_of(engine, options=MappingProxyType({}), versions_stay=False, **settings):
    rollout = rollout_section(**{"rollout_max_concurrency": 8, **settings})
    request_settings = RequestSettings(
        SamplingParams(20), segment_len=6, versions_stay=versions_stay
    )
    return Producer(rollout, lambda: engine, prompt_for, request_settings, **options)


def step_samples(producer, step):
    return [sample for group in producer.next_batch(step) for sample, _ in group]


@pytest.mark.parametrize("length", [3, 6, 7, 18, 20, 50])
def test_an_answer_in_segments_is_the_whole_answer(length):
    engine = SimulatedEngine(length=lambda _: length)
    with producer_of(engine) as producer:
        samples = step_samples(producer, 0)
    for sample in samples:
        assert sample.response_len == min(length, 20) == sample.loss_mask.sum()
        assert len(sample.routed_experts) == sample.num_tokens - 1
        assert sample.finish_reason == ("stop" if length <= 20 else "length")
    assert max(engine.asked_for) <= 6
    begun = [tokens for sample_id, _, tokens in engine.asked if sample_id == 0]
    assert begun == list(range(0, min(length, 20), 6))


def test_a_drained_update_waits_for_the_last_segment():
    engine = SimulatedEngine(length=lambda _: 20, tick_s=0.005)
    with producer_of(engine) as producer:
        time.sleep(0.05)
        with producer.quiesced():
            assert not engine.running
            engine.version = 1
            producer.set_version(1)
        samples = step_samples(producer, 0)
    assert all(len(np.unique(s.weight_versions[s.loss_mask])) == 1 for s in samples)


def test_where_versions_stay_an_answer_ends_on_its_version_in_all_segments_and_nothing_waits():
    class SideBySide(SimulatedEngine):
        async def generate(self, request):
            segment = await super().generate(request)
            return replace(
                segment, weight_versions=np.full_like(segment.token_ids, request.weight_version)
            )

    engine = SideBySide(length=lambda _: 20, tick_s=0.005)
    with producer_of(engine, versions_stay=True) as producer:
        time.sleep(0.05)
        running = set(engine.running)
        producer.set_version(1)
        assert running and not engine.calls
        steps = [step_samples(producer, step) for step in range(3)]
    for samples, version in zip(steps, (0, 0, 1)):  # the third was asked for after the update
        assert all(set(s.weight_versions[s.loss_mask].tolist()) == {version} for s in samples)
    assert max(engine.asked_for) <= 6


def test_an_aborted_update_does_not_wait_for_the_next_segments():
    engine = SimulatedEngine(length=lambda _: 20, tick_s=0.005)
    with producer_of(engine, pause_generation_mode="abort") as producer:
        time.sleep(0.07)
        with producer.quiesced():
            done = len(engine.asked)
            engine.version = 1
            producer.set_version(1)
        samples = step_samples(producer, 0)
    assert done < 4 * 2 * 4, "not all segments were asked for before the update"
    assert any(len(np.unique(s.weight_versions[s.loss_mask])) == 2 for s in samples)
    assert all(s.response_len == 20 for s in samples)


def test_an_engine_that_stops_short_of_a_segment_is_not_asked_to_go_on():
    """An answer that the engine's own limit ended is complete."""

    class Short(SimulatedEngine):
        async def generate(self, request):
            return await super().generate(replace(request, max_new_tokens=4))

    engine = Short(length=lambda _: 50)
    with producer_of(engine) as producer:
        assert all(sample.response_len == 4 for sample in step_samples(producer, 0))


class OneBad(SimulatedEngine):
    """Sample 3 is bad once the others of its step are complete."""

    async def generate(self, request):
        if request.sample_id == 3:
            await asyncio.sleep(0.2)
            raise BadAnswer("sample 3: 2 log-probs, expected 4")
        return await super().generate(request)


def test_a_failed_producer_still_gives_its_complete_samples_and_what_waits_for_a_reward():
    async def slow_reward(sample):
        await asyncio.sleep(0.6 if sample.sample_id == 2 else 0.0)
        return 1.0

    engine = OneBad()
    with producer_of(
        engine, {"scorer": GroupScorer(slow_reward)}, max_weight_staleness=0
    ) as producer:
        assert producer.failure is None
        with pytest.raises(BadAnswer, match="sample 3: 2 log-probs, expected 4"):
            producer.next_batch(0)
        assert isinstance(producer.failure, BadAnswer)
        state = producer.snapshot()
    assert [sample.sample_id for sample, _ in state.samples] == [0, 1, 2]
    assert [facts["places"] for facts in state.facts["groups"]] == [[[0, 1], [1, 1]], [[0, 1]]]


def test_a_failed_producer_sends_nothing_more():
    engine = OneBad(tick_s=0.05)
    with producer_of(engine, rollout_max_concurrency=2, max_weight_staleness=1) as producer:
        with pytest.raises(BadAnswer):
            producer.next_batch(0)
        asked = len(engine.asked)
        time.sleep(0.3)
        assert len(engine.asked) == asked

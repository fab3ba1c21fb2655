"""The producer against a fake engine: staleness, order, concurrency, failures, closing."""

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from r3train.config.data_settings import DataSection
from r3train.engine.backend import EngineDied, SamplingParams
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.generation.scheduler import GroupScorer
from r3train.rewards.scoring import Scorer
from tests.fakes.server import prompt_for, rollout_section, SimulatedEngine

virtual = pytest.mark.usefixtures("virtual_clock")


def engine(fail_at=None, tick_s=0.001):
    """Two tokens an answer, of the weights that each request expects; some answers take longer."""
    slow = lambda sample_id: 1 + sample_id * 7 % 5 / 4  # noqa: E731
    return SimulatedEngine(
        length=lambda _: 2, slow=slow, tick_s=tick_s, version=None, fail_at=fail_at
    )


def scorer(function, weight_of_key=None, **settings):
    path = f"tests.unit.reward_functions:{function}"
    data = DataSection(prompt_data="-", custom_rm_path=path, **settings)
    return Scorer(data, weight_of_key=weight_of_key)


def producer_of(backend, options=MappingProxyType({}), **settings):
    settings = {
        "rollout_batch_size": 3,
        "num_rollout": 6,
        "max_weight_staleness": 1,
        "rollout_max_concurrency": 4,
    } | settings
    return Producer(
        rollout_section(**settings),
        lambda: backend,
        prompt_for,
        RequestSettings(SamplingParams(4)),
        **options,
    )


@virtual
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_group_is_submitted_further_ahead_than_the_staleness_allows(staleness):
    backend = engine()
    with producer_of(backend, max_weight_staleness=staleness) as producer:
        for step in range(6):
            groups = producer.next_batch(step)
            assert [[s.sample_id for s, _ in group] for group in groups] == [
                [6 * step + 2 * g, 6 * step + 2 * g + 1] for g in range(3)
            ]
            time.sleep(0.05)  # time enough to run too far ahead
            furthest = max(sample_id for sample_id, *_ in backend.asked) // 6
            assert furthest == min(step + staleness, 5)
            with producer.quiesced():
                producer.set_version(step + 1)
    for sample_id, version, _ in backend.asked:
        assert 0 <= sample_id // 6 - version <= staleness
    assert sorted(sample_id for sample_id, *_ in backend.asked) == list(range(36))
    assert backend.most <= 4


@virtual
def test_nothing_runs_while_quiesced_and_it_resumes_afterwards():
    backend = engine(tick_s=0.01)
    with producer_of(backend, max_weight_staleness=5) as producer:
        time.sleep(0.02)
        with producer.quiesced():
            assert not backend.running
            asked = len(backend.asked)
            assert 0 < asked < 36
            time.sleep(0.1)
            assert len(backend.asked) == asked
        for step in range(6):
            producer.next_batch(step)
    assert len(backend.asked) == 36


def test_what_holds_the_loop_is_in_the_counts_of_the_batch_that_it_held_up():
    class Holds(SimulatedEngine):
        async def generate(self, request):
            if request.sample_id == 0:
                time.sleep(0.5)  # as reading a large answer in the loop would
            return await super().generate(request)

    with producer_of(Holds(version=None), max_weight_staleness=0) as producer:
        holds = []
        for step in range(2):
            producer.next_batch(step)
            holds.append(producer.stats()["longest_hold_s"])
            with producer.quiesced():
                producer.set_version(step + 1)
    assert 0.4 < holds[0] != holds[1]


@virtual
def test_a_run_resumes_at_its_step_with_its_group_numbers():
    backend = engine()
    with producer_of(backend, {"start_rollout": 4}, max_weight_staleness=0) as producer:
        groups = producer.next_batch(4)
    assert groups[0][0][0].group_id == 12 and groups[0][0][0].sample_id == 24
    assert {version for _, version, _ in backend.asked} == {4}


def test_rewards_are_computed_off_the_loop_and_stay_with_their_sample():
    with producer_of(engine(), {"scorer": GroupScorer(scorer("by_prompt"))}) as producer:
        for sample, reward in (pair for group in producer.next_batch(0) for pair in group):
            assert reward == sample.group_id / 2


@pytest.mark.parametrize("of_group", [False, True])
def test_the_parts_of_a_reward_go_with_its_sample(of_group):
    made = scorer("tables", {"length": 2.0, "score": 4.0})
    with producer_of(
        engine(),
        {"scorer": GroupScorer(score_group=made.group) if of_group else GroupScorer(made)},
    ) as producer:
        for sample, reward in (pair for group in producer.next_batch(0) for pair in group):
            assert sample.reward_parts == (len(sample.text), 0.5)
            assert (reward, type(reward)) == (2 * len(sample.text) + 2, float)


class NumberingTeacher:
    """Gives every sample its id as log-probs, after a while."""

    def __init__(self, fail_at=None):
        self.fail_at, self.closed = fail_at, False

    async def __call__(self, sample):
        await asyncio.sleep(0.01)
        if sample.sample_id == self.fail_at:
            raise RuntimeError(f"teacher: sample {sample.sample_id}")
        log_probs = np.full(sample.num_tokens, -sample.sample_id, np.float32)
        return replace(sample, teacher_log_probs=log_probs)

    async def aclose(self):
        self.closed = True


@virtual
@pytest.mark.parametrize("kind", ["each", "group"])
def test_a_teacher_scores_every_sample_before_its_reward(kind):
    async def reward_one(sample):
        return float(-sample.teacher_log_probs[0])

    async def group(samples):
        return [await reward_one(sample) for sample in samples]

    teacher = NumberingTeacher()
    how = {"each": {"score": reward_one}, "group": {"score_group": group}}[kind]
    with producer_of(engine(), {"scorer": GroupScorer(teacher=teacher, **how)}) as producer:
        scored = [pair for scored_group in producer.next_batch(0) for pair in scored_group]
    assert [reward for _, reward in scored] == [sample.sample_id for sample, _ in scored]
    assert teacher.closed


def test_a_teacher_that_fails_ends_the_run():
    with producer_of(
        engine(), {"scorer": GroupScorer(teacher=NumberingTeacher(fail_at=3))}
    ) as producer:
        with pytest.raises(RuntimeError, match="teacher: sample 3"):
            producer.next_batch(0)


def test_a_reward_that_takes_too_long_ends_the_run_with_its_prompt_and_its_bound():
    score = scorer("hangs", reward_timeout_s=3.0)
    with producer_of(engine(), {"scorer": GroupScorer(score)}) as producer:
        with pytest.raises(
            ValueError,
            match=r"prompt prompts:1: reward .*:hangs took longer than reward_timeout_s 3 \(sample",
        ):
            producer.next_batch(0)
        assert {sample.group_id for sample, _ in producer.snapshot().samples} >= {0, 2}


def test_a_reward_that_never_returns_does_not_keep_the_process():
    script = """
from tests.unit.generation.test_producer import engine, GroupScorer, producer_of, scorer
never = scorer("hangs", reward_timeout_s=0.2)
with producer_of(engine(), {"scorer": GroupScorer(never)}) as producer:
    producer.next_batch(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "longer than reward_timeout_s 0.2" in done.stderr


@virtual
def test_a_group_is_scored_as_a_whole_once_all_its_samples_are_there():
    asked = []

    async def places(samples):
        asked.append([sample.sample_id for sample in samples])
        return [float(place) for place, _ in enumerate(samples)]

    with producer_of(
        engine(), {"scorer": GroupScorer(score_group=places)}, n_samples_per_prompt=4
    ) as producer:
        groups = producer.next_batch(0)
    assert [[reward for _, reward in group] for group in groups] == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert all(sorted(ids) == list(range(ids[0], ids[0] + 4)) for ids in asked)
    first = {group[0][0].sample_id for group in groups}
    assert first <= {ids[0] for ids in asked} and all(ids == sorted(ids) for ids in asked)


@virtual
def test_a_half_made_group_is_scored_as_a_whole_after_a_restart():
    async def hundreds(samples):
        return [100.0 + place for place, _ in enumerate(samples)]

    async def alone(sample):
        return 1.0 if sample.sample_id % 4 else await asyncio.sleep(600)

    settings = {"n_samples_per_prompt": 4, "num_rollout": 1, "rollout_max_concurrency": 16}
    with producer_of(engine(), {"scorer": GroupScorer(alone)}, **settings) as producer:
        while producer.stats()["finished_samples"] < 12:
            time.sleep(0.01)
        state = producer.snapshot()
    assert len(state.samples) == 9
    options = {"scorer": GroupScorer(score_group=hundreds), "state": state}
    with producer_of(engine(), options, **settings) as producer:
        groups = producer.next_batch(0)
    assert [[reward for _, reward in group] for group in groups] == [
        [100.0, 101.0, 102.0, 103.0]
    ] * 3


@virtual
def test_a_snapshot_waits_for_the_rewards_that_are_under_way_and_no_longer():
    asked = set()

    async def waits(sample):
        asked.add(sample.group_id)
        await asyncio.sleep(5 * (sample.group_id == 3))
        return 1.0

    with producer_of(engine(), {"scorer": GroupScorer(waits)}) as producer:
        producer.next_batch(0)
        while 3 not in asked:
            time.sleep(0.01)
        began = time.monotonic()
        assert 3 in {sample.group_id for sample, _ in producer.snapshot().samples}
        assert time.monotonic() - began < 6


@virtual
@pytest.mark.parametrize("of_group", [False, True])
def test_waiting_samples_of_another_reward_are_scored_again_and_not_generated(of_group):
    async def before(sample):
        return 0.1 if sample.sample_id % 4 < 2 else await asyncio.sleep(600)

    async def now(sample):
        return 5.0

    async def now_for_all(samples):
        return [5.0] * len(samples)

    settings = {"n_samples_per_prompt": 4, "num_rollout": 1, "rollout_max_concurrency": 16}
    with producer_of(engine(), {"scorer": GroupScorer(before)}, **settings) as producer:
        while producer.stats()["finished_samples"] < 12:
            time.sleep(0.01)
        state = producer.snapshot()
    assert len(state.samples) == 6
    after = GroupScorer(score_group=now_for_all) if of_group else GroupScorer(now)
    options, backend = {"scorer": after, "state": replace(state, score_again=True)}, engine()
    with producer_of(backend, options, **settings) as producer:
        groups = producer.next_batch(0)
    assert [[reward for _, reward in group] for group in groups] == [[5.0] * 4] * 3
    assert sorted(sample_id % 4 for sample_id, *_ in backend.asked) == [2] * 3 + [3] * 3


@virtual
@pytest.mark.parametrize("of_group", [False, True])
def test_a_complete_group_that_waits_is_trained_with_the_new_reward_alone(of_group):
    async def before(sample):
        return 0.1

    async def now(sample):
        await asyncio.sleep(0.05)
        return 5.0

    async def now_for_all(samples):
        return [await now(sample) for sample in samples]

    with producer_of(engine(), {"scorer": GroupScorer(before)}) as producer:
        while not producer.stats()["buffered_groups"]:
            time.sleep(0.01)
        state = producer.snapshot()
    assert state.samples
    after = GroupScorer(score_group=now_for_all) if of_group else GroupScorer(now)
    options = {"scorer": after, "state": replace(state, score_again=True)}
    with producer_of(engine(), options) as producer:
        groups = producer.next_batch(0)
    assert [[reward for _, reward in group] for group in groups] == [[5.0] * 2] * 3


@virtual
def test_a_failed_generation_is_raised_by_whoever_waits_at_once():
    backend = engine(fail_at=7)
    with producer_of(backend, max_weight_staleness=0) as producer:
        producer.next_batch(0)
        with producer.quiesced():
            producer.set_version(1)
        with pytest.raises(EngineDied, match="sample 7 met a dead engine"):
            producer.next_batch(1)
    assert backend.closed


@pytest.mark.parametrize("where", ["score", "prompt_for", "make_backend"])
def test_a_failure_anywhere_in_the_producer_is_raised_with_its_own_type(where):
    def fail(*_):
        raise ValueError(f"{where} is broken")

    producer = Producer(
        rollout_section(rollout_max_concurrency=4),
        fail if where == "make_backend" else engine,
        fail if where == "prompt_for" else prompt_for,
        RequestSettings(SamplingParams(4)),
        scorer=GroupScorer(fail) if where == "score" else GroupScorer(),
    )
    with producer, pytest.raises(ValueError, match=f"{where} is broken"):
        producer.next_batch(0)


@virtual
def test_a_complete_batch_is_taken_though_an_engine_has_died_or_a_stop_has_come():
    def fail(*_):
        raise EngineDied("nobody waits for it")

    with producer_of(engine(), {"check_alive": fail}, num_rollout=1) as producer:
        while producer.stats()["buffered_groups"] < 3:
            time.sleep(0.01)
        assert len(producer.next_batch(0, on_wait=fail)) == 3


def test_a_dead_engine_is_noticed_while_waiting_though_no_request_fails():
    died = threading.Event()

    def check_alive():
        if died.is_set():
            raise EngineDied("the engine is gone")

    backend = engine(tick_s=500)
    with producer_of(backend, {"check_alive": check_alive}) as producer:
        threading.Timer(0.3, died.set).start()
        with pytest.raises(EngineDied, match="gone"):
            producer.next_batch(0)
    assert backend.closed and not backend.running


def test_waiting_reports_counts_that_add_up():
    seen = []
    backend = engine(tick_s=0.2)
    with producer_of(backend, max_weight_staleness=0) as producer:
        producer.next_batch(0, on_wait=seen.append)
        stats = producer.stats()
    assert seen and all(0 <= each["in_flight"] <= 4 for each in seen)
    assert stats["generated_tokens"] == 12 and stats["finished_samples"] == 6
    assert stats["in_flight"] == 0 and stats["buffered_groups"] == 0
    assert stats["waiting_s"] > 0.1


def test_asking_for_a_step_that_cannot_come_fails_instead_of_hanging():
    with producer_of(engine(), max_weight_staleness=1) as producer:
        with pytest.raises(AssertionError, match="never submitted"):
            producer.next_batch(2)
        with pytest.raises(AssertionError, match="step 6 of 6"):
            producer.next_batch(6)
        producer.next_batch(0)
        with pytest.raises(AssertionError, match="step 0 was asked for, step 1 is the next"):
            producer.next_batch(0)


@virtual
def test_a_sample_that_waits_for_its_reward_holds_no_slot():
    backend = engine()

    async def score(_sample):
        async with asyncio.timeout(60):
            while len(backend.requests) < 2:
                await asyncio.sleep(1)
        return 0.0

    scored_late = {"scorer": GroupScorer(score)}
    with producer_of(backend, scored_late, rollout_max_concurrency=1) as producer:
        producer.next_batch(0)


@virtual
def test_closing_twice_in_mid_generation_leaves_no_thread():
    backend = engine(tick_s=500)
    producer = producer_of(backend)
    time.sleep(0.05)
    producer.close()
    producer.close()
    assert backend.closed
    assert not [t for t in threading.enumerate() if t.name == "producer"]

"""An evaluation next to generation: one weight version, its share of the places, its numbers."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from r3train.engine.backend import SamplingParams
from r3train.generation.episode import generate_once
from r3train.generation.eval_sets import EvalSet, EvaluationEnded, evaluate, evaluation_metrics
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.types import Prompt
from tests.fakes.server import EVAL_IDS, SimulatedEngine, prompt_for, rollout_section

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def length_as_reward(samples):
    assert len({sample.prompt.prompt_id for sample in samples}) == 1
    return [float(sample.response_len) for sample in samples]


def eval_set(name="held_out", num_prompts=3, num_samples=2, score=length_as_reward, **sampling):
    return EvalSet(
        name=name,
        prompts=[
            Prompt(f"e:{i}", i, f"say {i}", np.array([i, 1], np.int32), i)
            for i in range(num_prompts)
        ],
        num_samples=num_samples,
        sampling=SamplingParams(**{"max_new_tokens": 4, **sampling}),
        score=score,
        make_episode=lambda prompt: generate_once,
        decode=lambda ids: " ".join(map(str, ids)),
        segment_len=None,
        samples_per_episode=1,
    )


class Engine(SimulatedEngine):
    """The last token of an evaluation's answer says the version ``relabelled``."""

    relabelled = None

    async def generate(self, request):
        segment = await super().generate(request)
        if self.relabelled is not None and request.sample_id >= EVAL_IDS:
            segment.weight_versions[-1] = self.relabelled
        return segment


def of_evaluations(engine):
    return [request for request in engine.requests if request.sample_id >= EVAL_IDS]


def producer_of(engine, eval_slots=2, **settings):
    settings = {"rollout_max_concurrency": 6, "rollout_batch_size": 3, **settings}
    return Producer(
        rollout_section(**settings),
        lambda: engine,
        prompt_for,
        RequestSettings(SamplingParams(4)),
        eval_slots=eval_slots,
    )


def test_rows_are_in_order_and_hold_prompt_label_answer_reward_and_version():
    engine = Engine()
    with producer_of(engine) as producer:
        producer.begin_evaluation([eval_set()])
        producer.await_evaluation()
        rows = producer.take_evaluation()["held_out"]
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [
        (f"e:{prompt}", sample) for prompt in range(3) for sample in range(2)
    ]
    assert rows[2] == {
        "prompt_id": "e:1",
        "sample": 0,
        "prompt": "say 1",
        "label": 1,
        "answer": "9 9 9 9",
        "reward": 4.0,
        "version": 0,
        "response_len": 4,
        "finish_reason": "stop",
    }


def test_an_episodes_own_reward_counts_and_the_other_samples_are_scored_together():
    asked, scored = [], []

    async def score(samples):
        scored.append([sample.sample_id for sample in samples])
        return [0.5 for _ in samples]

    def make_episode(prompt):
        async def episode(generate, prompt, *, sampling, sample_id):
            asked.append(sample_id)
            sample = await generate()
            return [sample], 7.0 if sample_id % 3 == 1 else None

        return episode

    with producer_of(Engine()) as producer:
        producer.begin_evaluation(
            [replace(eval_set(num_samples=3, score=score), make_episode=make_episode)]
        )
        producer.await_evaluation()
        rows = producer.take_evaluation()["held_out"]
    first = min(asked)
    expected_rewards = [7.0 if (first + i) % 3 == 1 else 0.5 for i in range(9)]
    assert [row["reward"] for row in rows] == expected_rewards and expected_rewards.count(7.0) == 3
    assert sorted(map(len, scored)) == [2, 2, 2]


def test_an_evaluation_asks_with_its_own_sampling_and_for_no_routes():
    engine = Engine(length=lambda _: 3)
    asked = eval_set(max_new_tokens=3, temperature=0.25, top_p=0.5, top_k=7)
    with producer_of(engine) as producer:
        producer.begin_evaluation([asked])
        producer.await_evaluation()
        producer.take_evaluation()
        producer.next_batch(0)
    assert len(of_evaluations(engine)) == 6
    assert all(r.sampling == asked.sampling and not r.wants_routes for r in of_evaluations(engine))
    assert all(r.fresh_prefix for r in of_evaluations(engine))
    training_requests = [r for r in engine.requests if r.sample_id < EVAL_IDS]
    assert all(r.sampling == SamplingParams(4) and r.wants_routes for r in training_requests)
    assert len({r.sample_id for r in engine.requests}) == len(engine.requests)


def test_two_sets_draw_with_other_seeds_and_a_second_evaluation_with_the_same():
    ids = []
    for names in (("a",), ("b", "a")):
        engine = Engine()
        with producer_of(engine) as producer:
            producer.begin_evaluation([eval_set(name) for name in names])
            producer.await_evaluation()
            producer.take_evaluation()
        ids.append({r.sample_id for r in of_evaluations(engine)})
    assert len(ids[0]) == 6 and len(ids[1]) == 12 and ids[0] < ids[1]


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort"])
def test_a_weight_update_waits_for_the_evaluation_and_one_version_answers_all_of_it(mode):
    engine = Engine(slow=lambda sample_id: 20 if sample_id >= EVAL_IDS else 1)
    with producer_of(engine, pause_generation_mode=mode) as producer:
        producer.next_batch(0)
        producer.begin_evaluation([eval_set(num_prompts=4)])
        with producer.quiesced():
            assert not [i for i in engine.running if i >= EVAL_IDS]
            assert len(of_evaluations(engine)) == 8
            engine.version = 1
            producer.set_version(1)
        rows = producer.take_evaluation()["held_out"]
    assert {row["version"] for row in rows} == {0} and len(rows) == 8


def test_an_answer_of_another_version_fails_the_set_alone():
    engine = Engine()
    engine.relabelled = 3  # of somebody else's weights
    with producer_of(engine) as producer:
        producer.begin_evaluation([eval_set()])
        producer.await_evaluation()
        error = producer.take_evaluation()["held_out"]
        assert len(producer.next_batch(0)) == 3
    assert isinstance(error, ValueError) and "weight versions [0, 3], not 0" in str(error)


@pytest.mark.parametrize("places", [1, 2, 5])
def test_an_evaluation_takes_its_share_of_the_places_and_generation_the_rest(places):
    engine = Engine(tick_s=0.002)
    with producer_of(engine, eval_slots=places, max_weight_staleness=3) as producer:
        producer.begin_evaluation([eval_set("a", 10), eval_set("b", 10)])
        producer.await_evaluation()
        assert engine.most_evaluated == places
        assert engine.most == 6, "places that the evaluation leaves are not used, or too many are"
        producer.take_evaluation()


def test_generation_with_much_to_do_leaves_an_evaluation_its_share():
    engine = Engine()
    with producer_of(engine, num_rollout=100, max_weight_staleness=99) as producer:
        while len(engine.running) < 6:  # every place is taken
            time.sleep(0.001)
        producer.begin_evaluation([eval_set()])
        producer.await_evaluation()
        training_requests = len(engine.requests) - len(of_evaluations(engine))
        assert training_requests < 300, f"{training_requests} of 600 samples came first"
        assert engine.most == 6, "more requests at once than places"


def test_a_place_that_an_evaluation_gives_back_is_taken_though_its_set_goes_on():
    slow_ids = set()

    def slow(sample_id):
        if sample_id >= EVAL_IDS and not slow_ids:
            slow_ids.add(sample_id)
        return 2000 if sample_id in slow_ids else 1

    engine = Engine(slow=slow, length=lambda _: 2)
    with producer_of(engine, eval_slots=6, num_rollout=100, max_weight_staleness=99) as producer:
        while len(engine.running) < 6:
            time.sleep(0.001)
        producer.begin_evaluation([eval_set()])  # six answers, which have all places for a while
        while not slow_ids or len(of_evaluations(engine)) < 6:
            time.sleep(0.001)
        time.sleep(0.1)
        assert slow_ids < set(engine.running) and len(engine.running) == 6


def test_when_no_rollout_is_left_an_evaluation_has_every_place():
    engine = Engine(tick_s=0.002)
    with producer_of(engine, num_rollout=1) as producer:
        producer.next_batch(0)
        producer.begin_evaluation([eval_set(num_prompts=10)])
        producer.await_evaluation()
    assert engine.most_evaluated == 6


def test_an_error_of_one_set_leaves_the_other_and_the_rollout():
    async def raises(samples):
        raise ValueError(f"no reward for {samples[0].prompt.prompt_id}")

    engine = Engine()
    with producer_of(engine) as producer:
        producer.begin_evaluation([eval_set("bad", score=raises), eval_set("good")])
        producer.await_evaluation()
        evaluation = producer.take_evaluation()
        assert "no reward for e:" in str(evaluation["bad"]) and len(evaluation["good"]) == 6
        assert len(producer.next_batch(0)) == 3 and producer.failure is None


def test_an_evaluation_that_is_given_up_ends_its_requests_and_keeps_the_sets_that_are_complete():
    engine = Engine(slow=lambda i: 2000 if engine.slow_ids and i in engine.slow_ids else 1)
    engine.slow_ids = set()
    with producer_of(engine, eval_slots=6) as producer:
        producer.begin_evaluation([eval_set("quick")])
        producer.await_evaluation()
        engine.slow_ids = set(sorted(r.sample_id for r in of_evaluations(engine))[:3])
        assert len(producer.take_evaluation()["quick"]) == 6
        producer.begin_evaluation([eval_set("quick"), eval_set("other", 1, 1)])
        time.sleep(0.2)
        evaluation = producer.take_evaluation()
        assert isinstance(evaluation["quick"], EvaluationEnded) and len(evaluation["other"]) == 1
        assert set(engine.cancelled) == engine.slow_ids
        assert len(producer.next_batch(0)) == 3, "places were not given back"


def test_without_a_version_to_ask_for_all_answers_must_still_be_of_one():
    """``r3train eval`` on a server that somebody else runs."""
    engine = Engine()

    async def run():
        room = asyncio.Semaphore(1)
        return await evaluate(eval_set(), engine, None, lambda: room)

    engine.version = 12
    assert {row["version"] for row in asyncio.run(run())} == {12}

    class Moving(Engine):
        async def generate(self, request):
            self.version += 1
            return await super().generate(request)

    engine = Moving()
    with pytest.raises(ValueError, match=r"answers of several weight versions: \[1, 2"):
        asyncio.run(run())


def rows_of(rewards, lengths=None, reasons=None):
    count = len(rewards)
    lengths, reasons = lengths or [5] * count, reasons or ["stop"] * count
    return [
        {"reward": r, "response_len": n, "finish_reason": why}
        for r, n, why in zip(rewards, lengths, reasons)
    ]


def test_the_numbers_of_two_prompts_with_four_answers_each_by_hand():
    rows = rows_of(
        [1, 0, 0, 0, 1, 1, 0, 0],
        [2, 4, 6, 8, 1, 1, 1, 9],
        ["stop", "length", "stop", "length"] + ["stop"] * 4,
    )
    assert evaluation_metrics(rows, 4) == {
        "mean": 3 / 8,
        # means 1/4 and 1/2: their sample standard deviation is (1/4) / sqrt(2), over sqrt(2)
        "standard_error": pytest.approx(1 / 8),
        "pass_at_1": pytest.approx(3 / 8),
        # 1 - C(3,2)/C(4,2) = 1/2 and 1 - C(2,2)/C(4,2) = 5/6
        "pass_at_2": pytest.approx((1 / 2 + 5 / 6) / 2),
        "pass_at_4": 1.0,
        "truncated_share": 2 / 8,
        "response_len_mean": 4.0,
        "response_len_max": 9,
        "num_prompts": 2,
        "num_samples": 8,
    }


def test_five_answers_have_pass_at_1_2_and_4():
    numbers = evaluation_metrics(rows_of([0, 0, 0, 0, 1]), 5)
    # 1 - C(4,k)/C(5,k) = k/5
    assert [numbers[f"pass_at_{k}"] for k in (1, 2, 4)] == pytest.approx([0.2, 0.4, 0.8])
    assert "pass_at_5" not in numbers and "pass_at_8" not in numbers
    assert (
        numbers["standard_error"] is None
    ), "one prompt tells nothing about the spread over prompts"


def test_rewards_beyond_0_and_1_have_a_mean_and_no_pass_rate():
    numbers = evaluation_metrics(rows_of([-1.0, 2.0, 0.5, 0.5]), 2)
    assert numbers["mean"] == 0.5 and numbers["standard_error"] == 0.0
    assert not any(key.startswith("pass_at") for key in numbers)

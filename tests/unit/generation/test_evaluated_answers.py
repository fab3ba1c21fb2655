"""One answer of an evaluation: its requests, what ends it, and its row."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.generation.test_evaluation import Engine, eval_set
from tests.fakes.server import SimulatedEngine

from r3train.engine.backend import EngineError
from r3train.generation import stitch
from r3train.generation.buffer import Group
from r3train.generation.eval_sets import evaluate
from r3train.generation.scheduler import GroupScorer


class Once:
    async def __aenter__(self):
        pass

    async def __aexit__(self, *_):
        pass


def rows(engine, asked, version=0, on_answer=lambda: None):
    return asyncio.run(evaluate(asked, engine, version, Once, on_answer))


class Endless(Engine):
    def __init__(self):
        super().__init__(length=lambda sample_id: 1000)


def two_turns(prompt):
    """Six tokens, three words of an environment, and what is left of the budget."""

    async def episode(generate, prompt, *, sampling, sample_id):
        first = await generate(None, 6)
        return [await generate(stitch.observe(first, [60, 61, 62]))], 0.5

    return episode


def test_a_turn_of_an_evaluation_comes_in_segments_up_to_its_own_limit():
    engine = Endless()
    asked = eval_set(num_prompts=1, num_samples=1, max_new_tokens=20)
    asked = replace(asked, make_episode=two_turns, segment_len=4)
    [row] = rows(engine, asked)
    assert [r.max_new_tokens for r in engine.requests] == [4, 2, 4, 4, 3]
    assert [len(r.token_ids) for r in engine.requests] == [2, 6, 11, 15, 19]
    # 20 tokens of the budget, three of them the environment's
    assert (row["response_len"], row["finish_reason"], row["reward"]) == (17, "length", 0.5)
    assert row["answer"].split()[6:9] == ["60", "61", "62"]


def test_an_answer_that_the_server_aborts_fails_the_set():
    class Aborts(SimulatedEngine):
        async def generate(self, request):
            return replace(await super().generate(request), finish_reason="abort", rows=None)

    with pytest.raises(EngineError, match=r"sample .*\(prompt 'e:0'\) was aborted"):
        rows(Aborts(), eval_set(num_prompts=1, num_samples=1))


def test_every_answer_is_counted_and_has_an_id_of_its_own():
    engine, notes = Endless(), []
    asked = eval_set(num_prompts=3, num_samples=2)
    found = rows(engine, asked, on_answer=lambda: notes.append(1))
    assert len(found) == len(notes) == 6
    ids = [r.sample_id for r in engine.requests]
    assert len(set(ids)) == 6 and sorted(ids) == list(range(min(ids), min(ids) + 6))
    assert {r.group_id for r in engine.requests} == {-2, -3, -4}
    assert np.unique([r.weight_version for r in engine.requests]).tolist() == [0]


@pytest.mark.parametrize("version", [0, None])
def test_an_episode_of_several_samples_is_one_row_and_one_without_a_token_has_the_version_of_the_others(
    version,
):
    """Sample ids of episodes do not overlap: a sample's id gives its seed."""

    def two_samples_or_none(prompt):
        async def episode(generate, prompt, *, sampling, sample_id):
            if prompt.prompt_id.endswith("1"):
                return [stitch.begin(prompt, sample_id=sample_id, group_id=0)], 0.25
            first = await generate(None, 6)
            begun = stitch.begin(prompt, sample_id=sample_id + 1, group_id=0)
            return [first, await generate(begun, 4)], None

        return episode

    engine = Endless()
    asked = eval_set(num_prompts=2, num_samples=2, max_new_tokens=20)
    asked = replace(asked, make_episode=two_samples_or_none, samples_per_episode=2)
    found = rows(engine, asked, version)
    assert [row["response_len"] for row in found] == [10, 10, 0, 0]
    assert {row["version"] for row in found} == {0}
    assert [row["reward"] for row in found[2:]] == [0.25] * 2
    assert len(found[0]["answer"].split()) == 4, "the last sample's"
    assert len({request.sample_id for request in engine.requests}) == 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_evaluation_scores_the_sample_that_a_rollout_scores(count):
    """Of an episode of several the last, which ends it."""
    scored = []

    async def of_evaluation(samples):
        scored.append([sample.num_tokens for sample in samples])
        return [1.0] * len(samples)

    async def of_rollout(sample):
        scored.append([sample.num_tokens])
        return 1.0

    made = []

    def make_episode(prompt):
        async def episode(generate, prompt, *, sampling, sample_id):
            begun = [
                stitch.begin(prompt, sample_id=sample_id + i, group_id=0) for i in range(count)
            ]
            made[:] = [await generate(one, 2 + i) for i, one in enumerate(begun)]
            return list(made), None

        return episode

    asked = eval_set(num_prompts=1, num_samples=1, score=of_evaluation, max_new_tokens=20)
    asked = replace(asked, make_episode=make_episode, samples_per_episode=count)
    rows(Endless(), asked)
    group = Group(0, asked.prompts[0])
    asyncio.run(GroupScorer(of_rollout)(group, 0, made, None, 1))
    assert scored[0] == scored[1] == [made[-1].num_tokens]


def test_a_set_without_a_token_was_not_evaluated():
    def none(prompt):
        async def episode(generate, prompt, *, sampling, sample_id):
            return [stitch.begin(prompt, sample_id=sample_id, group_id=0)], 0.0

        return episode

    asked = replace(eval_set(num_prompts=1, num_samples=1), make_episode=none)
    with pytest.raises(ValueError, match="not one answer has a token"):
        rows(Endless(), asked)

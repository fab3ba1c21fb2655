"""Prompts drawn by difficulty: solved ones rest, and the draws follow from the file alone."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from tests.unit.generation.test_producer_staleness import producer_of, train
from tests.fakes.server import SimulatedEngine, prompt_for

from r3train.data.curriculum import DifficultyOrder, pass_rate, PASS_RATES_FILE, SOLVED
from r3train.generation.scheduler import GroupScorer

PROMPTS, BATCH, STEPS = 12, 4, 24


def order_of(path, prompts=PROMPTS, *, staleness=0, shuffle=True, seed=3):
    ids = [prompt_for(number).prompt_id for number in range(prompts)]
    how = dict(draws_per_rollout=BATCH, max_staleness=staleness, path=path)
    return DifficultyOrder(ids, seed, shuffle, **how)


def trained(order, rate_of, first, last):
    """Draw and train rollouts; returns the prompts drawn."""
    drawn = []
    for step in range(first, last):
        groups = range(step * BATCH, (step + 1) * BATCH)
        prompts = [order.index(group) for group in groups]
        for group, prompt in zip(groups, prompts):
            order.note(step, group, prompt_for(prompt).prompt_id, rate_of(prompt, step))
        drawn += prompts
    return drawn


def test_an_epoch_has_open_prompts_once_and_partly_solved_ones_twice(tmp_path):
    rates = [0.0, 0.5, SOLVED, 1.0] * 3
    drawn = trained(order_of(tmp_path / "f"), lambda prompt, _: rates[prompt], 0, 6)
    assert sorted(drawn[:PROMPTS]) == list(range(PROMPTS))  # nothing is known of the first epoch
    lines = (tmp_path / "f").read_text().splitlines()
    draws = [line["draws"] for line in map(json.loads, lines) if "draws" in line]
    second = Counter(drawn[PROMPTS : PROMPTS + draws[1]])
    assert [second[prompt] for prompt in range(0, PROMPTS, 4)] == [1] * 3
    assert [second[prompt] for prompt in range(1, PROMPTS, 4)] == [2] * 3
    assert 9 <= draws[1] < 15 and max(second.values()) == 2  # a solved one comes by lot


def test_each_solved_prompt_comes_in_a_fourth_of_the_epochs(tmp_path):
    drawn = Counter(trained(order_of(tmp_path / "f"), lambda prompt, _: float(prompt > 5), 0, 200))
    rest, often = [drawn[p] for p in range(6, PROMPTS)], [drawn[p] for p in range(6)]
    assert min(rest) > 0 and sum(rest) == pytest.approx(sum(often) / 4, rel=0.3)


def test_when_every_prompt_is_solved_all_come_again_and_those_that_are_forgotten_stay(tmp_path):
    def rate(prompt, step):
        return 0.0 if prompt == 7 and step >= 3 else 1.0

    drawn = trained(order_of(tmp_path / "f"), rate, 0, STEPS)
    assert sorted(drawn[PROMPTS : 2 * PROMPTS]) == list(range(PROMPTS))
    assert Counter(drawn[2 * PROMPTS :]).most_common(1)[0][0] == 7


def test_without_shuffling_the_prompts_keep_the_order_of_their_file(tmp_path):
    drawn = trained(order_of(tmp_path / "f", shuffle=False), lambda p, _: -float(p % 2), 0, 6)
    assert drawn == [*range(12), *range(12)]


@pytest.mark.parametrize("cut", range(1, STEPS, 3))
def test_a_resumed_run_draws_what_the_undisturbed_one_does(cut, tmp_path):
    def rate(prompt, step):
        return float(np.random.default_rng((prompt, step)).choice([0.0, 0.5, 1.0]))

    whole = trained(order_of(tmp_path / "a"), rate, 0, STEPS)
    before = trained(order_of(tmp_path / "b"), rate, 0, cut)
    after = trained(order_of(tmp_path / "b"), rate, cut, STEPS)
    assert before + after == whole
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert trained(order_of(tmp_path / "c", seed=4), rate, 0, STEPS) != whole


def test_the_draws_do_not_depend_on_how_far_training_is_ahead_of_them(tmp_path):
    def drawn(path, draws_ahead):
        order, prompts = order_of(path, staleness=2), []
        for step in range(STEPS):
            last = min((step + 1 + draws_ahead) * BATCH, STEPS * BATCH)
            prompts += [order.index(group) for group in range(len(prompts), last)]
            for group in range(step * BATCH, (step + 1) * BATCH):
                rate = float(np.random.default_rng(group).choice([0.0, 0.5, 1.0]))
                order.note(step, group, prompt_for(prompts[group]).prompt_id, rate)
        return prompts

    assert drawn(tmp_path / "a", 0) == drawn(tmp_path / "b", 1) == drawn(tmp_path / "c", 2)


def test_a_group_that_was_put_back_has_no_rate(tmp_path):
    order = order_of(tmp_path / "f", prompts=2)
    for group in range(4):
        order.note(0, group, prompt_for(order.index(group)).prompt_id, 1.0)
    for group in range(4):
        order.note(0, group, prompt_for(order.index(group)).prompt_id, None)
    assert {order.index(4), order.index(5)} == {0, 1}


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"rate": 0.25},
            r"f:3: prompt prompts:\d+: its checksum is \d+, expected \d+: it was altered",
        ),
        ({"crc32": 1}, r"f:3: prompt prompts:\d+: its checksum is 1"),
        ({"prompt_id": "prompts:8"}, "f:3: prompt prompts:8: its checksum"),
        (None, "an epoch of .* draws, and the lines before it give .*: lines are missing"),
    ],
)
def test_a_damaged_line_is_named_with_its_prompt(change, said, tmp_path):
    path = tmp_path / "f"
    trained(order_of(path), lambda prompt, _: 0.5 if prompt % 2 else 1.0, 0, 9)
    lines = path.read_text().splitlines()
    lines[2:3] = [] if change is None else [json.dumps({**json.loads(lines[2]), **change})]
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError, match=said):
        order_of(path)


def test_a_prompt_of_other_data_is_refused_by_name(tmp_path):
    trained(order_of(tmp_path / "f"), lambda *_: 0.5, 0, 3)
    ids = [f"others:{number}" for number in range(PROMPTS)]
    how = dict(draws_per_rollout=BATCH, max_staleness=0, path=tmp_path / "f")
    with pytest.raises(
        ValueError, match=r"f:2: prompt prompts:\d+ is none of the run's 12 prompts"
    ):
        DifficultyOrder(ids, 3, True, **how)


def test_rewards_beyond_0_and_1_count_as_these():
    assert pass_rate([-1.0, 2.0, 0.5, 1.0]) == pytest.approx(0.625)


def test_a_producer_that_is_restored_samples_as_the_undisturbed_one(tmp_path):
    """Two rollouts ahead, where answers come at other times in each run."""
    how = dict(max_weight_staleness=2, num_rollout=12)

    def run(path, first, last, state=None, ticks=1):
        order = order_of(path, staleness=2)
        engine = SimulatedEngine(slow=lambda sample: 1 + (sample * ticks) % 5)
        engine.version = first

        def noted(outcome):
            if outcome.pass_rate is not None:
                order.note(outcome.step, outcome.group_id, outcome.prompt_id, outcome.pass_rate)

        async def score(sample):
            return float(np.random.default_rng(sample.sample_id).choice([0.0, 1.0]))

        options = {"start_rollout": first, "state": state, "scorer": GroupScorer(score=score)}
        with producer_of(
            engine,
            noted,
            options,
            prompt_for=lambda group: prompt_for(order.index(group)),
            **how,
        ) as producer:
            batches = train(producer, engine, range(first, last))
            kept = path.read_text()  # as a checkpoint copies it
            state = producer.snapshot()
        path.write_text(kept)
        return [[g[0][0].prompt.prompt_id for g in groups] for groups in batches], state

    whole, _ = run(tmp_path / "a", 0, 12)
    before, state = run(tmp_path / PASS_RATES_FILE, 0, 5, ticks=3)
    after, _ = run(tmp_path / PASS_RATES_FILE, 5, 12, state, ticks=2)
    assert before + after == whole
    assert len({tuple(sorted(batch)) for batch in whole}) > 3

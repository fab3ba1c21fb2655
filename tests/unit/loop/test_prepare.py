"""A rollout as its ranks get it: optimizer steps, microbatches, and what each row is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.algo.rollouts import sample
from tests.unit.config.test_config import config
from tests.unit.hf_model import facts

from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.prepare import (
    advantages_with_kl,
    data_rank_of_samples,
    Preparation,
    Prepared,
    record_samples,
    step_expectation,
    train_samples,
)
from r3train.loop.recorded import Recorded
from r3train.types import RankTopology, RouteShape, RowClass, TrainSample

HF = facts(moe_layer_numbers=(1, 2))
LENGTHS = (3, 5, 4, 6)


def trained(lengths=LENGTHS, **fields) -> list[TrainSample]:
    return [
        TrainSample(sample(i, n, **fields), float(i), np.full(n, 1 + i, np.float32))
        for i, n in enumerate(lengths)
    ]


def prepared(samples, place=RankTopology(), rollout_id=0, plant=None, **settings):
    made = config(
        **{"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_tokens_per_gpu": 8, **settings}
    )
    places = [replace(place, rank=r) for r in range(place.world_size)]
    return Preparation(made, HF, None, places, ("train",)).prepare(rollout_id, samples, plant)


def test_each_optimizer_step_takes_its_samples_in_order_and_weighs_them_by_themselves():
    ready = prepared(trained(), global_batch_size=2, loss_aggregation="seq-mean-token-mean")
    of_steps = [[s for groups in step for group in groups for s in group] for step in ready.steps]
    assert [sorted(s.sample.sample_id for s in step) for step in of_steps] == [[0, 1], [2, 3]]
    for step in of_steps:
        rows = {s.sample.sample_id: s.sample.num_tokens - 1 for s in step}
        weights = {s.sample.sample_id: s.loss_weight for s in step}
        total = sum(rows.values())
        assert weights == pytest.approx({i: total / (2 * n) for i, n in rows.items()})
    [microbatches] = ready.microbatches
    assert [m.microbatch_id for m in microbatches] == list(range(sum(ready.counts)))
    assert len(ready.counts) == 2 and sum(ready.counts) == len(microbatches)
    order = [sorted(m.sample_ids.tolist()) for m in microbatches]
    assert sorted(sum(order[: ready.counts[0]], [])) == [0, 1]


def test_rows_are_told_how_old_the_weights_were_that_sampled_them():
    one = trained((4,))[0]
    versions = np.array([-1, 3, 4, 5], np.int32)
    one = replace(one, sample=replace(one.sample, weight_versions=versions))
    settings = {"rollout_batch_size": 1, "n_samples_per_prompt": 1}
    [[batch]] = prepared([one], rollout_id=5, **settings).microbatches
    assert batch.ages.tolist() == [2, 1, 0, 0]


def test_a_served_teachers_log_probs_reach_the_rows():
    taught = [
        replace(s, sample=replace(s.sample, teacher_log_probs=-np.arange(n, dtype=np.float32)))
        for s, n in zip(trained((3, 4)), (3, 4))
    ]
    settings = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
    opd = {"use_opd": True, "opd_type": "sglang", "opd_teacher_url": "h:1"}
    [[batch]] = prepared(taught, **settings, **opd).microbatches
    assert batch.teacher_log_probs.tolist() == [-1, -2, 0, -1, -2, -3, 0]
    [[batch]] = prepared(taught, **settings).microbatches
    assert batch.teacher_log_probs is None


@pytest.mark.parametrize(
    "place, microbatches",
    [
        (RankTopology(), 3),  # 18 tokens in packs of at most 8: no two hold them
        (RankTopology(world_size=2, cp_size=2), 2),  # packs of 16
        (RankTopology(world_size=2, dp_size=2), 4),  # as many for each data-parallel rank
        (RankTopology(world_size=2, pp_size=2), 3),
        (RankTopology(world_size=2, pp_size=2, vpp_size=2), 4),  # a multiple of the stages
    ],
)
def test_microbatches_hold_as_many_tokens_as_the_context_parallel_ranks_together(
    place, microbatches
):
    ready = prepared(trained(), place)
    assert sum(map(len, ready.microbatches)) == microbatches
    assert {len(of_rank) for of_rank in ready.microbatches} == {microbatches // place.dp_size}
    most = 8 * place.cp_size
    assert all(m.layout.num_tokens <= most for of_rank in ready.microbatches for m in of_rank)
    ids = [i for of_rank in ready.microbatches for m in of_rank for i in m.sample_ids.tolist()]
    assert sorted(ids) == [0, 1, 2, 3]


@pytest.mark.parametrize("sequence_parallel, divides", [(False, False), (True, True)])
def test_rows_are_padded_for_tensor_parallel_ranks_that_share_the_sequence(
    sequence_parallel, divides
):
    place = RankTopology(world_size=4, tp_size=4, sequence_parallel=sequence_parallel)
    ready = prepared(trained((3, 3)), place, rollout_batch_size=1)
    [[batch]] = ready.microbatches
    assert (batch.layout.num_rows % 4 == 0) is divides


def test_a_planted_bug_is_trained_and_the_rollout_stays_as_it_was():
    given = trained()

    def plant(rollout_id, samples):
        return [replace(s, advantages=-s.advantages) for s in samples]

    ready = prepared(given, plant=plant)
    assert ready.samples is given
    [microbatches] = ready.microbatches
    assert all((m.advantages <= 0).all() and m.advantages.any() for m in microbatches)


def test_the_statistics_of_rewards_are_those_before_penalties_for_length():
    groups = [[(sample(0, 3), 1.0), (sample(1, 5), 0.0)]]
    samples, stats = train_samples(groups, AlgorithmSection(length_penalty_coef=0.5), 8)
    assert (stats.mean, stats.max, stats.pass_at_k) == (0.5, 1.0, {1: 0.5, 2: 1.0})
    assert [s.reward for s in samples] == [1.0 - 0.5 * 2 / 8, 0.0 - 0.5 * 4 / 8]


def test_the_kl_is_paid_on_loss_tokens_alone_and_a_likelier_token_pays():
    """k1 is old - reference: where the actor finds a token likelier than the reference, it costs."""
    algorithm = AlgorithmSection(
        advantage_estimator="grpo", grpo_std_normalization=False, kl_coef=0.5
    )
    given = [TrainSample(sample(i, 3), 1.0, np.zeros(3, np.float32)) for i in range(2)]
    log_ratios = {0: np.array([9.0, 1.0, 1.0], np.float32), 1: np.zeros(3, np.float32)}
    first, second = advantages_with_kl(given, algorithm, log_ratios)
    # rewards 1 - 0.5 * 2 and 1, whose mean is 0.5
    assert first.advantages.tolist() == [0, -0.5, -0.5]
    assert second.advantages.tolist() == [0, 0.5, 0.5]


def test_what_the_evidence_is_held_against_counts_the_ranks_of_a_stage():
    shape = RouteShape(2, 2, 4)
    routes = {"routed_experts": np.zeros((2, 2, 2), np.uint8)}
    settings = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "max_tokens_per_gpu": 8}
    made = config(
        **settings,
        use_rollout_routing_replay=True,
        enable_r3_correctness_check=True,
    )
    places = [
        RankTopology(
            rank=r,
            world_size=4,
            dp_rank=r // 2,
            dp_size=2,
            pp_rank=r % 2,
            pp_size=2,
            moe_layer_numbers=((1,), (2,)),
        )
        for r in range(4)
    ]
    [one] = trained((3,))
    one = replace(one, sample=replace(one.sample, **routes))
    hf = facts(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_layer_numbers=(1, 2))
    ready = Preparation(made, hf, shape, places, ("train",)).prepare(0, [one])
    recorded = record_samples([one.sample], data_rank_of_samples(ready.steps), 2, (1, 2))
    expected = ready.expectation(recorded)
    assert [list(place.ranks) for place in expected.places] == [[0, 1], [2, 3]]
    # the row of the last token is none: 2 of 3 rows are replayed, and one is filled
    routes = expected.streams["routes"]
    assert routes.rows_replayed == {1: 2, 2: 2}
    assert routes.rows_filled == {1: 1, 2: 1}
    # one microbatch on each of the two data-parallel ranks of a layer's stage
    assert routes.calls["train"]["replay_forward"] == {1: 2, 2: 2}


def test_a_rollout_whose_turns_are_not_whole_episodes_is_refused():
    turns = [sample(i, trajectory_id=0, is_last_step=False) for i in range(2)]
    with pytest.raises(ValueError, match="sample 1 is the last of the batch and no last step"):
        train_samples([[(turn, 1.0) for turn in turns]], AlgorithmSection(), 8)


@pytest.mark.parametrize(
    "settings, prompt",
    [
        ({}, {"cached": {4: 2}, "prefilled": {4: 1}}),
        # of a cache that no update empties only the rows that the server computed are known
        ({"flush_cache_on_update": False}, {"cached": {-1: 2}, "prefilled": {4: 1}}),
        (
            {"pause_generation_mode": "in_place", "max_weight_staleness": 1},
            {"cached": {-1: 2}, "prefilled": {-1: 1}},
        ),
    ],
)
def test_rows_are_counted_under_the_weights_that_are_known_to_have_computed_them(settings, prompt):
    one = trained((6,))[0]
    versions = np.array([-1, -1, -1, -1, 4, 4], np.int32)
    classes = [RowClass.CACHED] * 2 + [RowClass.PREFILLED] * 2 + [RowClass.DECODED, RowClass.FILLED]
    given = replace(one.sample, weight_versions=versions, row_classes=np.array(classes, np.uint8))
    made = config(
        **{"use_rollout_routing_replay": True, "enable_r3_correctness_check": True, **settings},
    )
    expected = step_expectation(
        Preparation(made, HF, None, [RankTopology()], ("train",)),
        Prepared(4, [replace(one, sample=given)], [], [], [1]),
        Recorded(1, HF.moe_layer_numbers),
    )
    # the row before a sampled token is of its weights whatever the cache was
    of_prompt = {**prompt["prefilled"], 4: prompt["prefilled"].get(4, 0) + 1}
    assert expected.rows_by_class == {
        "decoded": {4: 1},
        "prefilled": of_prompt,
        "prefilled_again": {},
        "cached": prompt["cached"],
        "filled": {-1: 1},
    }

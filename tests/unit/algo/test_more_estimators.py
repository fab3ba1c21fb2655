"""MaxRL, REINFORCE++, whitening and penalties for length, through the function that the loop calls."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.algo.rollouts import advantages, sample, scored

from r3train.algo.rule_checks import check_algorithm
from r3train.algo.reward_stats import group_stats
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.kl_reward import held_ratios, log_ratios
from r3train.loop.prepare import advantages_with_kl, train_samples
from r3train.ids import token_uids


def trained(groups, max_response_len=8, **settings):
    return train_samples(groups, AlgorithmSection(**settings), max_response_len)[0]


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # mean 1/4: (1 - 1/4) / (1/4)
        ([4.0, 2.0], [1 / 3, -1 / 3]),
        ([0.0, 0.0], [0.0, 0.0]),  # nobody solved it
        ([1.0, -3.0], [0.0, 0.0]),  # a mean below 0 gives no scale
        ([1.0, -0.5], [1.5, -1.5]),  # 3/4 over 1/2, the largest over their number
    ],
)
def test_max_rl_equals_the_hand_worked_group(rewards, expected):
    got = advantages([rewards], advantage_estimator="max_rl")
    np.testing.assert_allclose(got, [expected], rtol=1e-6)


def test_max_rl_is_bounded_whatever_the_rewards_are():
    near_zero = [0.1, 0.2, -0.3, 0.1, 0.2, -0.3, 0.0, 0.0]
    rng = np.random.default_rng(0)
    groups = [near_zero, *(rng.integers(0, 2, 8) - 0.3 * rng.random(8) for _ in range(400))]
    for rewards in groups:
        [got] = advantages([list(rewards)], advantage_estimator="max_rl")
        assert np.abs(got).max() <= 2 * len(rewards) and abs(np.sum(got)) < 1e-6
    not_negative = rng.random((50, 8))
    want = not_negative / not_negative.mean(axis=1, keepdims=True) - 1
    got = advantages([list(row) for row in not_negative], advantage_estimator="max_rl")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_works_with_one_sample_a_prompt_and_its_baseline_does_not():
    check_algorithm(AlgorithmSection(advantage_estimator="reinforce_plus_plus"), 1)
    for name in ("reinforce_plus_plus_baseline", "max_rl", "rloo"):
        with pytest.raises(ValueError, match=f"{name} compares the samples.*at least 2, got 1"):
            check_algorithm(AlgorithmSection(advantage_estimator=name), 1)


def test_a_rollout_without_two_loss_tokens_is_not_whitened():
    first = sample(0, 2)
    got = trained([[(first, 8.0)]], advantage_estimator="reinforce_plus_plus")
    assert got[0].advantages.tolist() == [0.0, 8.0]


def test_rewards_that_differ_by_rounding_alone_teach_nothing():
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(rewards)) == 2
    assert advantages([rewards]).tolist() == [[0, 0, 0]]
    assert group_stats(np.array([rewards, [0.3, 0.3, 0.30001]])).num_zero_variance == 1


def test_penalties_come_after_the_statistics_and_before_the_advantages():
    groups = [[(sample(0, 3), 1.0), (sample(1, 9), 1.0)]]
    samples, stats = train_samples(
        groups, AlgorithmSection(length_penalty_coef=0.5, advantage_estimator="rloo"), 8
    )
    assert stats.mean == 1.0 and stats.num_zero_variance == 1
    assert [s.advantages[1] for s in samples] == [0.375, -0.375]


def test_all_turns_of_an_episode_pay_for_its_whole_length():
    turns = [
        replace(sample(i, 1 + length), trajectory_id=episode, is_last_step=last)
        for i, (episode, length, last) in enumerate([(0, 3, False), (0, 3, True), (1, 2, True)])
    ]
    got = trained([[(turn, 1.0) for turn in turns]], 8, length_penalty_coef=0.8)
    assert [s.reward for s in got] == pytest.approx([0.4, 0.4, 0.8])


def test_a_truncated_answer_is_masked_and_its_reward_counts_for_its_group():
    cut = replace(sample(0), finish_reason="length")
    got = trained(
        [[(cut, 0.0), (sample(1), 2.0)]], mask_truncated=True, grpo_std_normalization=False
    )
    assert not got[0].sample.loss_mask.any() and not got[0].advantages.any()
    assert got[1].advantages.tolist() == [0, 1, 1]
    assert cut.loss_mask.any()  # the rollout's own record stays as it was


def paying_for_kl(groups, ratios, **settings):
    """Advantages of every sample; ratios: old - reference log-prob of each token of each sample."""
    algorithm = AlgorithmSection(kl_coef=0.5, **settings)
    samples, _ = train_samples(groups, algorithm, 8)
    ratios_by_sample = {s.sample.sample_id: np.array(r) for s, r in zip(samples, ratios)}
    return [s.advantages for s in advantages_with_kl(samples, algorithm, ratios_by_sample)]


def test_all_turns_of_an_episode_pay_for_the_kl_of_each():
    turns = [
        replace(sample(i, 2), trajectory_id=episode, is_last_step=last)
        for i, (episode, last) in enumerate([(0, False), (0, True), (1, True)])
    ]
    groups = [[(turn, 1.0) for turn in turns]]
    got = paying_for_kl(groups, [[0, 1.0], [0, 3.0], [0, 0.0]], advantage_estimator="rloo")
    assert [first[1] for first in got] == [-2.0, -2.0, 2.0]  # rewards 1 - 2 and 1


def test_a_reward_pays_for_log_ratios_within_20_and_for_none_that_the_loss_cannot_take():
    nan, inf = math.nan, math.inf
    old = torch.tensor([-1.0, -1.0, -50.0, -1.0, nan, -inf, -1.0])
    reference = torch.tensor([-3.0, -90.0, -1.0, -inf, -1.0, -1.0, nan])
    found = held_ratios(old, reference).tolist()
    assert found[:6] == [2.0, 20.0, -20.0, 20.0, 0.0, 0.0] and math.isnan(found[6])


def test_rows_in_any_order_become_the_log_ratios_of_the_tokens_that_they_predict():
    samples, _ = train_samples([[(sample(7, 4), 1.0), (sample(2, 3), 0.0)]], AlgorithmSection(), 8)
    uids = np.concatenate([token_uids(7, 3), token_uids(2, 2)])
    order = np.array([3, 0, 4, 2, 1])
    found = log_ratios(samples, uids[order], np.arange(1.0, 6.0)[order])
    assert {i: tokens.tolist() for i, tokens in found.items()} == {
        7: [0, 1, 2, 3],
        2: [0, 4, 5],
    }


def test_gdpo_names_a_sample_whose_reward_has_no_parts():
    with pytest.raises(ValueError, match="sample 0: its reward came without the parts"):
        trained(scored([[1.0, 0.0]]), advantage_estimator="gdpo", reward_keys=("a",))

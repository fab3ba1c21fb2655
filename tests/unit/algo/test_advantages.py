"""Advantage estimators, through the function that the loop calls."""

import math
import sys
import time

import numpy as np
import pytest
from tests.unit.algo.rollouts import advantages, sample, scored

from r3train.algo.advantages.estimators import check_advantages, get_advantage_estimator
from r3train.algo.advantages.building_blocks import centred
from r3train.algo.reward_stats import GroupStats, group_stats
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.prepare import train_samples


def test_grpo_adds_1e_6_to_the_std_and_not_to_the_variance():
    # deviations of 2e-6, std 2 sqrt(2) 1e-6: 1e-6 is a quarter of the sum
    got = advantages([[4e-6, 0.0]])
    expected = 2 / (1 + 2 * math.sqrt(2))
    np.testing.assert_allclose(got, [[expected, -expected]], rtol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e9 + 0.1])
def test_a_group_of_equal_rewards_gets_exactly_zero(normalise, reward):
    got = advantages([[reward] * 7], grpo_std_normalization=normalise)
    np.testing.assert_array_equal(got, np.zeros((1, 7), np.float32))


def test_the_mean_of_equal_rewards_would_leave_a_residue():
    rewards = np.full((1, 7), 1e9 + 0.1)
    assert (rewards - rewards.mean()).any() and not centred(rewards).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named_by_group_and_sample(bad):
    rewards = np.zeros((3, 4))
    rewards[1, 2] = bad
    with pytest.raises(ValueError, match="sample 2 in group 1 is"):
        train_samples(scored(rewards), AlgorithmSection(), 8)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (4, 0), (1, 2, 3)])
def test_rewards_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        group_stats(np.zeros(shape))


def test_group_stats_equal_the_hand_worked_batch():
    stats = group_stats(np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))
    assert stats == GroupStats(
        num_groups=3,
        num_zero_variance=2,
        mean=0.5,
        std=0.5,
        min=0.0,
        max=1.0,
        pass_at_k={1: 0.5, 2: pytest.approx(2 / 3)},
    )


# -- estimators of a user's own ------------------------------------------------------------------

HERE = "tests.unit.algo.test_advantages"


def by_position(groups, rewards, algorithm):
    """Later tokens earn more, prompt tokens too: those must not arrive."""
    return [
        [np.arange(s.num_tokens) * r for s, r in zip(g, group_rewards)]
        for g, group_rewards in zip(groups, rewards)
    ]


def nothing(groups, rewards, algorithm):
    return None


def a_number_a_sample(groups, rewards, algorithm):
    return rewards.tolist()


def too_short(groups, rewards, algorithm):
    return [[np.zeros(2) for _ in group] for group in groups]


def not_finite(groups, rewards, algorithm):
    return [[np.full(s.num_tokens, math.nan) for s in group] for group in groups]


def takes_rewards_only(rewards):
    return rewards


def fails(groups, rewards, algorithm):
    raise KeyError("gold")


def exits(groups, rewards, algorithm):
    sys.exit(0)


def waits(groups, rewards, algorithm):
    time.sleep(20)


def words(groups, rewards, algorithm):
    return [["many" for _ in group] for group in groups]


def numbers(groups, rewards, algorithm):
    return [1.0 for _ in groups]


async def later(groups, rewards, algorithm):
    return []


def test_an_estimator_found_by_path_sets_every_token():
    samples, _ = train_samples(
        scored([[1.0, 10.0]]), AlgorithmSection(advantage_estimator=f"{HERE}:by_position"), 8
    )
    assert [s.advantages.tolist() for s in samples] == [[0, 1, 2], [0, 10, 20]]


def test_masked_tokens_get_zero_whatever_the_estimator_says():
    masked = sample(0)
    masked.loss_mask[1] = False
    samples, _ = train_samples(
        [[(masked, 1.0)]], AlgorithmSection(advantage_estimator=f"{HERE}:by_position"), 8
    )
    assert samples[0].advantages.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", r"nothing: returned NoneType, expected a list for each group .* \[2\]"),
        ("a_number_a_sample", r"sample 0 got advantages of shape \[\], expected one .* 3 tokens"),
        ("too_short", r"sample 0 got advantages of shape \[2\], expected one .* 3 tokens"),
        ("not_finite", "not_finite: sample 0 got an advantage that is not finite"),
        ("fails", "^--advantage-estimator .*:fails: raised KeyError: 'gold' .test_advantages.py:"),
        ("exits", "^--advantage-estimator .*:exits: raised SystemExit: 0 "),
        ("waits", "^--advantage-estimator .*:waits: it took longer than 0.2 s$"),
        ("words", "^--advantage-estimator .*:words: sample 0: could not convert"),
        ("numbers", "^--advantage-estimator .*:numbers: raised TypeError: .*has no len"),
    ],
)
def test_an_estimator_that_misbehaves_is_named_with_what_it_did(name, message, monkeypatch):
    if name == "waits":
        monkeypatch.setattr("r3train.algo.advantages.estimators.LIMIT_S", 0.2)
    with pytest.raises(ValueError, match=message):
        train_samples(
            scored([[1.0, 0.0]]), AlgorithmSection(advantage_estimator=f"{HERE}:{name}"), 8
        )


@pytest.mark.parametrize(
    "name, message",
    [
        ("grbo", r"^--advantage-estimator grbo: unknown, expected one of gdpo, grpo.*mean grpo\?$"),
        (f"{HERE}:absent", f"{HERE} has no absent"),
        (f"{HERE}:HERE", "found 'tests.*expected a function"),
        (f"{HERE}:later", "found an async function"),
        (
            f"{HERE}:takes_rewards_only",
            r"found a function \(rewards\), expected a function \(groups, rewards, algorithm\)",
        ),
        ("no.such.module:f", "cannot import no.such.module"),
        ("module:", "expected module:object"),
    ],
)
def test_a_name_without_an_estimator_is_refused_at_start_up(name, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_advantages(AlgorithmSection(advantage_estimator=name), 8)
    assert len(str(refused.value).splitlines()) == 1


def test_an_estimator_that_compares_samples_is_refused_with_one_a_prompt():
    with pytest.raises(ValueError, match="grpo compares the samples.*at least 2, got 1"):
        check_advantages(AlgorithmSection(), 1)
    check_advantages(AlgorithmSection(), 2)
    check_advantages(AlgorithmSection(advantage_estimator=f"{HERE}:by_position"), 1)


def test_a_registered_estimator_is_found_by_its_path_too():
    path = "r3train.algo.advantages.grpo:grpo"
    assert get_advantage_estimator(path) is get_advantage_estimator("grpo")

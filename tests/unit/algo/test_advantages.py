import math

import numpy as np
import pytest

from r3train.algo.advantages import GroupStats, grpo_advantages, group_stats, token_advantages


def test_advantages_equal_the_hand_worked_group_with_the_sample_std():
    # mean 0.25; deviations .75, -.25 x 3; sum of squares .75; over n - 1 = 3: variance .25, std .5
    got = grpo_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), std_normalization=True, eps=0.0)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[1.5, -0.5, -0.5, -0.5]], rtol=1e-6)


def test_eps_is_added_to_the_std_and_not_to_the_variance():
    got = grpo_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), std_normalization=True, eps=0.5)
    np.testing.assert_allclose(got, [[0.75, -0.25, -0.25, -0.25]], rtol=1e-6)


def test_without_std_normalization_the_advantage_is_the_distance_from_the_group_mean():
    got = grpo_advantages(np.array([[3.0, 1.0], [10.0, 30.0]]), std_normalization=False)
    np.testing.assert_array_equal(got, np.array([[1.0, -1.0], [-10.0, 10.0]], np.float32))


def test_a_group_is_scored_against_itself_alone():
    alone = grpo_advantages(np.array([[0.0, 2.0, 4.0]]), std_normalization=True)
    beside = grpo_advantages(np.array([[0.0, 2.0, 4.0], [900.0, 0.0, 7.0]]), std_normalization=True)
    np.testing.assert_array_equal(alone[0], beside[0])


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e9 + 0.1])
def test_a_group_of_equal_rewards_gets_exactly_zero(normalise, reward):
    got = grpo_advantages(np.full((1, 7), reward), std_normalization=normalise, eps=1e-30)
    np.testing.assert_array_equal(got, np.zeros((1, 7), np.float32))


@pytest.mark.parametrize("normalise", [True, False])
def test_a_group_of_one_gets_zero_and_no_nan(normalise):
    got = grpo_advantages(np.array([[5.0], [7.0]]), std_normalization=normalise)
    np.testing.assert_array_equal(got, np.zeros((2, 1), np.float32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named_by_group_and_sample(bad):
    rewards = np.zeros((3, 4))
    rewards[1, 2] = bad
    with pytest.raises(ValueError, match="sample 2 in group 1 is"):
        grpo_advantages(rewards, std_normalization=True)
    with pytest.raises(ValueError, match="sample 2 in group 1 is"):
        group_stats(rewards)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (4, 0), (1, 2, 3)])
def test_rewards_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        grpo_advantages(np.zeros(shape), std_normalization=True)


def test_group_stats_equal_the_hand_worked_batch():
    stats = group_stats(np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))
    assert stats == GroupStats(
        num_groups=3,
        num_zero_variance=2,
        num_all_best=1,
        mean=0.5,
        std=0.5,
        min=0.0,
        max=1.0,
        group_std_mean=pytest.approx(math.sqrt(0.5) / 3),
    )


def test_token_advantages_stand_on_the_loss_mask_and_nowhere_else():
    got = token_advantages(-1.5, np.array([False, True, True, False]))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array([0.0, -1.5, -1.5, 0.0], np.float32))


def test_a_loss_mask_of_numbers_is_refused():
    with pytest.raises(ValueError, match="expected bool"):
        token_advantages(1.0, np.array([0, 1, 1]))

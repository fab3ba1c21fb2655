"""RLOO: each episode against the mean of its siblings."""

import numpy as np
import pytest
from tests.unit.algo.rollouts import advantages

from r3train.algo.rule_checks import check_algorithm
from r3train.config.algorithm_settings import AlgorithmSection


@pytest.mark.parametrize(
    "rewards, expected",
    [
        # 1 against (0 + 0 + 0) / 3, 0 against (1 + 0 + 0) / 3
        ([1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # 3 against 1, 1 against 3
        ([3.0, 1.0], [2.0, -2.0]),
        # 6 against (0 + 3) / 2, 0 against (6 + 3) / 2, 3 against (6 + 0) / 2
        ([6.0, 0.0, 3.0], [4.5, -4.5, 0.0]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
    ],
)
def test_rloo_equals_the_hand_worked_group(rewards, expected):
    got = advantages([rewards], advantage_estimator="rloo")
    np.testing.assert_allclose(got, [expected], rtol=1e-6)


def test_every_reward_is_held_against_the_mean_of_the_others_of_its_group():
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    got = advantages(rewards.tolist(), advantage_estimator="rloo")
    for group, group_advantages in zip(rewards, got):
        means_without = [np.delete(group, i).mean() for i in range(7)]
        np.testing.assert_allclose(group_advantages, group - means_without, rtol=1e-5, atol=1e-6)


def test_rloo_with_one_sample_a_prompt_is_refused_at_start_up():
    with pytest.raises(ValueError, match="rloo compares the samples.*at least 2, got 1"):
        check_algorithm(AlgorithmSection(advantage_estimator="rloo"), 1)

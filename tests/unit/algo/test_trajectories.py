"""Step-wise batches: what is refused, by the sample's name; what an episode's steps earn."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.algo.rollouts import advantages, sample

from r3train.algo.trajectories import episode_places, episode_rewards, validate_trajectories
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.prepare import train_samples

CENTRED = AlgorithmSection(grpo_std_normalization=False)

IDS = [10, 11, 20, 30, 31, 32]
OF = [1, 1, 2, 3, 3, 3]
LAST = [False, True, True, False, False, True]


def step(sample_id, trajectory, last):
    return sample(sample_id, trajectory_id=trajectory, is_last_step=last)


def test_whole_adjacent_trajectories_pass():
    validate_trajectories(list(map(step, IDS, OF, LAST)))
    validate_trajectories([])


@pytest.mark.parametrize(
    "of, last, message",
    [
        ([1, None, 2, 3, 3, 3], LAST, "sample 11 has no trajectory_id"),
        (OF, [False, True, None, False, False, True], "sample 20 has no is_last_step"),
        (OF, [*LAST[:-1], False], "sample 32 is the last of the batch and no last step"),
        ([1, 1, 2, 1, 3, 3], [0, 1, 1, 1, 0, 1], "sample 30 is of trajectory 1, whose .* adjacent"),
        (
            OF,
            [False, False, True, False, False, True],
            "sample 11 is no last step, but trajectory 1",
        ),
        (OF, [True, True, True, False, False, True], "sample 10 is a last step, but trajectory 1"),
    ],
)
def test_each_fault_is_refused_with_the_sample(of, last, message):
    with pytest.raises(ValueError, match=message):
        validate_trajectories(list(map(step, IDS, of, last)))


def test_an_episode_has_one_reward():
    steps = [step(0, 7, False), step(1, 7, True), step(2, 4, True), step(3, 9, True)]
    rewards = episode_rewards(list(zip(steps, [0.5, 0.5, 1.0, 0.0])))
    assert rewards.tolist() == [0.5, 1.0, 0.0] and episode_places(steps) == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="trajectory 7 carry different rewards"):
        episode_rewards(list(zip(steps, [0.5, 0.25])))


def test_every_step_takes_its_episodes_advantage_whatever_the_number_of_turns():
    group = [
        (step(0, 0, False), 1.0),
        (step(1, 0, False), 1.0),
        (step(2, 0, True), 1.0),
        (step(4, 4, True), 0.0),
    ]
    samples, stats = train_samples([group], CENTRED, 8)
    assert [float(s.advantages.max() + s.advantages.min()) for s in samples] == [0.5] * 3 + [-0.5]
    assert (stats.mean, stats.num_groups) == (0.5, 1), "an episode counts once"
    one_each = advantages([[1.0, 0.0]], grpo_std_normalization=False)
    np.testing.assert_array_equal(one_each, [[0.5, -0.5]])


def test_a_batch_of_step_wise_and_whole_samples_mixed_is_refused():
    group = [(step(0, 0, True), 1.0), (sample(5), 0.0)]
    with pytest.raises(ValueError, match="sample 5 has no trajectory_id"):
        train_samples([group], CENTRED, 8)

"""The samples of an episode share one reward, which is asked for once, of its last sample."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.generation.session_play import Play, user

from r3train.algo.reward_stats import group_stats
from r3train.algo.trajectories import episode_rewards, validate_trajectories
from r3train.generation.buffer import Group
from r3train.generation.scheduler import GroupScorer


def session(number: int, roots: int) -> list:
    play = Play(seed=number)
    for root in range(roots):
        asyncio.run(play.ask([user(f"go {root}")]))
    return [
        replace(s, sample_id=s.sample_id + 64 * number, trajectory_id=64 * number)
        for s in play.session.samples()
    ]


@pytest.mark.parametrize("episode_reward", [None, 0.25])
def test_all_samples_of_a_session_have_the_reward_of_its_last_one_and_the_teachers_log_probs(
    episode_reward,
):
    asked = []

    async def score(sample) -> float:
        asked.append(sample)
        return 0.5

    async def teacher(sample):
        return replace(sample, teacher_log_probs=np.full(sample.num_tokens, -1.0, np.float32))

    samples = session(1, roots=3)
    group = Group(0, samples[0].prompt)
    scorer = GroupScorer(score=score, teacher=teacher)
    found = asyncio.run(scorer(group, 2, samples, episode_reward, 4))
    assert [reward for _, reward in found[2]] == [episode_reward or 0.5] * 3
    assert all((sample.teacher_log_probs == -1.0).all() for sample, _ in found[2])
    last = samples[-1].sample_id
    assert [s.sample_id for s in asked] == ([last] if episode_reward is None else [])


def test_a_session_counts_once_however_many_samples_it_has():
    one, five = session(1, roots=1), session(2, roots=5)
    validate_trajectories([*one, *five])
    rewards = [*((s, 1.0) for s in one), *((s, 0.0) for s in five)]
    assert episode_rewards(rewards).tolist() == [1.0, 0.0]
    assert group_stats(np.array([episode_rewards(rewards)])).mean == 0.5

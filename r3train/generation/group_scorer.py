"""Score what was generated: a teacher's log-probs, then rewards, one by one or a group at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from r3train.engine.backend import Teacher
from r3train.generation.buffer import Group
from r3train.rewards.weighted_sum import scored
from r3train.types import RolloutSample, Scored


async def _no_reward(sample: RolloutSample) -> float:
    return 0.0


@dataclass(frozen=True)
class GroupScorer:
    """Scores the samples of finished rollouts.

    score: gives a sample's reward if its episode gave none.  score_group, in its place: gives the rewards
    of all samples of a group at once.  teacher: adds its log-probs to each sample before the reward.
    """

    score: Callable[[RolloutSample], Awaitable[float]] = _no_reward
    score_group: Callable[[Sequence[RolloutSample]], Awaitable[list[float]]] | None = None
    teacher: Teacher | None = None

    async def __call__(
        self,
        group: Group,
        place: int,
        samples: list[RolloutSample],
        episode_reward: float | None,
        size: int,
    ) -> dict[int, list[Scored]]:
        """Score a rollout's samples; return the scored samples of each place of its group.

        place: the rollout's number in the group; episode_reward: the reward that its episode gave, or None; size:
        rollouts of a group.  With ``score_group`` the result is empty until the group's last rollout, which
        brings all places.
        """
        if self.teacher is not None:
            samples = list(await asyncio.gather(*map(self.teacher, samples)))
        if self.score_group is None:
            # the samples of an episode share the reward of its end
            reward = episode_reward if episode_reward is not None else await self.score(samples[-1])
            rewards = [reward] * len(samples)
            return {place: list(map(scored, samples, rewards))}
        assert (
            episode_reward is None and len(samples) == 1
        ), "environments have rewards of their own"
        group.unscored[place] = samples[0]
        if len(group.unscored) + len(group.samples) < size:
            return {}
        # also samples that an earlier run has scored
        earlier = {number: before[0][0] for number, before in group.samples.items()}
        samples_by_place = dict(sorted((earlier | group.unscored).items()))
        rewards = await self.score_group(list(samples_by_place.values()))
        places = {
            p: [scored(s, reward)] for (p, s), reward in zip(samples_by_place.items(), rewards)
        }
        group.samples.clear()
        return places

"""Episodes and their samples: one each, or step-wise one per turn, all with the episode's reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.types import RolloutSample, Scored


def validate_trajectories(samples: Sequence[RolloutSample]) -> None:
    """Check a batch in its order before it is trained: its samples are all whole episodes, or all steps.

    Raises ValueError naming the sample: where one lacks a field that others have; where the last sample
    is no last step; where a trajectory's steps are not adjacent; and where a last step is anything but
    the end of its trajectory.
    """
    if all(s.trajectory_id is None and s.is_last_step is None for s in samples):
        return
    for name in ("trajectory_id", "is_last_step"):
        for s in samples:
            if getattr(s, name) is None:
                raise ValueError(f"sample {s.sample_id} has no {name}")
    ended: set[int | None] = set()
    for s, after in zip(samples, [*samples[1:], None]):
        trajectory = s.trajectory_id
        if trajectory in ended:
            raise ValueError(
                f"sample {s.sample_id} is of trajectory {trajectory}, whose steps ended before: the"
                " steps of a trajectory must be adjacent"
            )
        ends = after is None or after.trajectory_id != trajectory
        if after is None and not s.is_last_step:
            raise ValueError(
                f"sample {s.sample_id} is the last of the batch and no last step: trajectory"
                f" {trajectory} was cut"
            )
        if ends and not s.is_last_step:
            raise ValueError(
                f"sample {s.sample_id} is no last step, but trajectory {trajectory} ends with it"
            )
        if s.is_last_step and not ends:
            raise ValueError(
                f"sample {s.sample_id} is a last step, but trajectory {trajectory} goes on after it"
            )
        if ends:
            ended.add(trajectory)


def episode_id(sample: RolloutSample) -> int:
    """The episode of a sample, which is the sample itself unless it is one turn of several.

    Unique within a run.
    """
    return sample.sample_id if sample.trajectory_id is None else sample.trajectory_id


def episode_places(group: Sequence[RolloutSample]) -> list[int]:
    """The place of each sample's episode among the group's, in the order of first samples.

    Samples of the episodes 7, 7, 4, 9 give 0, 0, 1, 2.
    """
    place: dict[int, int] = {}
    return [place.setdefault(episode_id(sample), len(place)) for sample in group]


def episode_rewards(group: Sequence[Scored]) -> np.ndarray:
    """One reward for each episode of a group, float64[n], in the order of first samples.

    Raises ValueError where two steps of an episode carry different rewards.
    """
    reward_by_episode: dict[int, float] = {}
    for sample, reward in group:
        episode = episode_id(sample)
        if episode in reward_by_episode and reward_by_episode[episode] != reward:
            raise ValueError(f"the steps of trajectory {episode} carry different rewards")
        reward_by_episode[episode] = reward
    return np.array(list(reward_by_episode.values()), dtype=np.float64)

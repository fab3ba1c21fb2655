"""Episodes and their samples: one each, or step-wise one a turn, all with the episode's reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.types import RolloutSample, Scored


def validate_trajectories(
    sample_ids: Sequence[int],
    trajectory_ids: Sequence[int | None] | None,
    is_last_step: Sequence[bool | None] | None,
) -> None:
    """Check a batch in its order before it is trained.

    Raises ValueError naming the sample: where either list is absent or of another length, or lacks
    an entry; where the last sample is no last step; where a trajectory's steps are not adjacent;
    and where a last step is anything but the end of its trajectory.
    """
    for name, values in (("trajectory_id", trajectory_ids), ("is_last_step", is_last_step)):
        if values is None:
            raise ValueError(f"step-wise samples need {name}, which the batch does not have")
        if len(values) != len(sample_ids):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(sample_ids)} samples"
                f" (the last is sample {sample_ids[-1] if len(sample_ids) else 'none'})"
            )
        for sample_id, value in zip(sample_ids, values):
            if value is None:
                raise ValueError(f"sample {sample_id} has no {name}")
    if not len(sample_ids):
        return
    ended: set[int] = set()
    last = len(sample_ids) - 1
    for i, sample_id in enumerate(sample_ids):
        trajectory = trajectory_ids[i]
        if trajectory in ended:
            raise ValueError(
                f"sample {sample_id} is of trajectory {trajectory}, whose steps ended before: the"
                " steps of a trajectory must be adjacent"
            )
        changes = i < last and trajectory_ids[i + 1] != trajectory
        if i == last and not is_last_step[i]:
            raise ValueError(
                f"sample {sample_id} is the last of the batch and no last step: trajectory"
                f" {trajectory} was cut"
            )
        if changes and not is_last_step[i]:
            raise ValueError(
                f"sample {sample_id} is no last step, but trajectory {trajectory} ends with it"
            )
        if is_last_step[i] and i < last and not changes:
            raise ValueError(
                f"sample {sample_id} is a last step, but trajectory {trajectory} goes on after it"
            )
        if changes:
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
    reward_of: dict[int, float] = {}
    for sample, reward in group:
        episode = episode_id(sample)
        if episode in reward_of and reward_of[episode] != reward:
            raise ValueError(f"the steps of trajectory {episode} carry different rewards")
        reward_of[episode] = reward
    return np.array(list(reward_of.values()), dtype=np.float64)

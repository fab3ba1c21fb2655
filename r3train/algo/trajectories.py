"""Step-wise trajectories: one training sample a turn, all of them with the episode's reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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


def trajectory_rewards(
    trajectory_ids: Sequence[int], rewards: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """One reward a trajectory of a group, and the trajectory of each sample.

    Returns (float64[n], int64[samples]), trajectories in the order of their first sample.  Raises
    ValueError where two steps of a trajectory carry different rewards.
    """
    place: dict[int, int] = {}
    of_sample = np.array([place.setdefault(t, len(place)) for t in trajectory_ids], dtype=np.int64)
    out = np.zeros(len(place), dtype=np.float64)
    out[of_sample] = rewards
    if (out[of_sample] != np.asarray(rewards, dtype=np.float64)).any():
        at = int(np.argmax(out[of_sample] != np.asarray(rewards)))
        raise ValueError(f"the steps of trajectory {trajectory_ids[at]} carry different rewards")
    return out, of_sample

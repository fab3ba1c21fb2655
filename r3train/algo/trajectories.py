"""Episodes and their samples: rewards, penalties for length, and the weight in the loss.

An episode has one sample, or step-wise one per turn, all with the episode's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from r3train.chat.token_ledger import without_cut_answers
from r3train.config.algorithm_settings import AlgorithmSection
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


def shaped_rewards(
    groups: Sequence[Sequence[RolloutSample]],
    rewards: np.ndarray,
    algorithm: AlgorithmSection,
    max_response_len: int,
) -> np.ndarray:
    """Subtract the penalties for length from each episode's reward, float64[G, n].

    An episode of ``len`` tokens of the model's own, of at most ``max_response_len`` (M), loses

    - ``overlong_penalty_factor * (len - (M - B)) / B`` with ``overlong_buffer_len`` B, if that is
      above 0 (DAPO's soft punishment, arXiv 2503.14476, equation 13);
    - ``length_penalty_coef * len / M``.
    """
    lengths = np.zeros_like(rewards)
    for group, group_lengths in zip(groups, lengths):
        np.add.at(group_lengths, episode_places(group), [int(s.loss_mask.sum()) for s in group])
    shaped = rewards - algorithm.length_penalty_coef * lengths / max_response_len
    buffer = algorithm.overlong_buffer_len
    if buffer is not None:
        above = np.maximum(lengths - (max_response_len - buffer), 0.0) / buffer
        shaped = shaped - algorithm.overlong_penalty_factor * above
    return shaped


def without_truncated(groups: Sequence[Sequence[RolloutSample]]) -> list[list[RolloutSample]]:
    """Mask every token of the samples that were cut at their longest length (``length``).

    Of an agent's samples the answers that were cut alone, each of which has a finish reason of its own.
    """
    return [
        [s for _, steps in groupby(group, key=episode_id) for s in _masked(list(steps))]
        for group in groups
    ]


def _masked(steps: Sequence[RolloutSample]) -> list[RolloutSample]:
    if steps[-1].token_ledger is not None:
        return without_cut_answers(steps)
    return [
        replace(s, loss_mask=np.zeros_like(s.loss_mask)) if s.finish_reason == "length" else s
        for s in steps
    ]


def loss_weights(
    num_loss_tokens: np.ndarray, algorithm: AlgorithmSection, max_response_len: int
) -> np.ndarray:
    """Weigh the episodes of one optimizer step: their number of loss tokens int[B] -> float64[B].

    The trainer adds up weighted rows over all ranks and divides by N, the loss tokens of the step.  S is the
    number of episodes that have a loss token, T the number that an episode has, in all of its samples:

    - token-mean: 1.  The loss is a mean over tokens (DAPO, arXiv 2503.14476).
    - seq-mean-token-mean: N / (S T).  A mean over episodes of their means (GRPO, arXiv 2402.03300).
    - seq-mean-token-sum: N / S.  A mean over episodes of their sums.
    - constant: N / (S max_response_len).  A mean over episodes of their sums, each divided by the same
      constant (Dr. GRPO, arXiv 2503.20783).

    >>> loss_weights(np.array([1, 3]), AlgorithmSection(loss_aggregation="seq-mean-token-mean"), 8)
    array([2.        , 0.66666667])
    """
    num_tokens = num_loss_tokens.sum()
    num_episodes = max(np.count_nonzero(num_loss_tokens), 1)
    each = {
        "token-mean": 1.0,
        "seq-mean-token-mean": num_tokens / (num_episodes * np.maximum(num_loss_tokens, 1)),
        "seq-mean-token-sum": num_tokens / num_episodes,
        "constant": num_tokens / (num_episodes * max_response_len),
    }[algorithm.loss_aggregation]
    return np.broadcast_to(each, num_loss_tokens.shape)

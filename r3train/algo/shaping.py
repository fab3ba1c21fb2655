"""Rewards and masks after the filters, before the advantages: lengths are paid for here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from r3train.algo.trajectories import episode_id, episode_places
from r3train.chat.token_ledger import without_cut_answers
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.types import RolloutSample


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

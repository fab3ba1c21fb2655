"""Small rollouts for the tests of the learning rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from r3train.algo.loss_rows import LossRows
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.loop.prepare import train_samples
from r3train.types import Prompt, RolloutSample, Scored


def sample(sample_id: int, length: int = 3, **fields) -> RolloutSample:
    """A sample of one prompt token and ``length - 1`` tokens of the model."""
    mask = np.arange(length) >= 1
    return RolloutSample(
        sample_id=sample_id,
        group_id=0,
        prompt=Prompt("p.jsonl:1", 0, "", np.zeros(1, np.int32), None),
        token_ids=np.arange(length, dtype=np.int32),
        prompt_len=1,
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -1.0, 0.0).astype(np.float32),
        routed_experts=None,
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="stop",
        **fields,
    )


def scored(rewards: Sequence[Sequence[float]]) -> list[list[Scored]]:
    """One group a row, one whole sample a reward."""
    width = len(rewards[0])
    return [
        [(sample(g * width + i), reward) for i, reward in enumerate(row)]
        for g, row in enumerate(rewards)
    ]


def advantages(rewards: Sequence[Sequence[float]], **settings) -> np.ndarray:
    """Advantages as a rollout's samples get them, float32[G, n]: checked to stand on the mask."""
    samples, _ = train_samples(scored(rewards), AlgorithmSection(**settings), 8)
    for s in samples:
        assert s.advantages.dtype == np.float32
        assert (s.advantages[~s.sample.loss_mask] == 0).all()
        assert len(set(s.advantages[s.sample.loss_mask].tolist())) == 1
    return np.array([s.advantages[1] for s in samples]).reshape(np.shape(rewards))


def loss_rows(log_probs, old, advantages, mask=None, samples=None, **streams) -> LossRows:
    """Rows whose other streams say nothing: the engine agrees, there is no reference.

    samples: the sample of each row, from 0; unset: all rows are of one.
    """
    mask = torch.ones(log_probs.shape, dtype=torch.bool) if mask is None else mask
    samples = torch.zeros(log_probs.shape, dtype=torch.int64) if samples is None else samples
    streams = {
        "rollout_log_probs": old,
        "entropy": torch.zeros_like(old),
        "loss_weights": old.new_ones(1 + max(samples.tolist(), default=0)),
    } | streams
    return LossRows(log_probs, old, advantages=advantages, mask=mask, samples=samples, **streams)

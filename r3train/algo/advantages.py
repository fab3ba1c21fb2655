"""Group-relative advantages: what a sample earned against its own siblings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The rewards of one rollout batch in numbers, G groups of n samples."""

    num_groups: int
    num_zero_variance: int  # groups whose rewards are all equal: they teach nothing
    num_all_best: int  # of those, the groups that sit at the batch's highest reward
    mean: float  # over all samples
    std: float  # over all samples, ddof = 0
    min: float
    max: float
    group_std_mean: float  # mean over groups of the std that normalises them (ddof = 1)


def grpo_advantages(
    rewards: np.ndarray, *, std_normalization: bool, eps: float = 1e-6
) -> np.ndarray:
    """Score each sample against its group: ``(r - mean) / (std + eps)``, or ``r - mean``.

    rewards: float[G, n], one row a group.  Returns float32[G, n].  The std is the sample std
    (ddof = 1), as torch.std computes it and as miles, slime and TRL use it; the paper does not say.
    ``std_normalization=False`` leaves the scale alone (Dr. GRPO, arXiv 2503.20783).
    A group whose rewards are all equal gets exactly 0, also where rounding would leave a residue
    for the division to blow up; so does a group of one.
    Raises ValueError for another shape and for a reward that is not finite, naming its place.
    Source: GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    rewards = _checked(rewards)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if std_normalization and rewards.shape[1] > 1:
        centred = centred / (rewards.std(axis=1, ddof=1, keepdims=True) + eps)
    return np.where(_zero_variance(rewards)[:, None], 0.0, centred).astype(np.float32)


def group_stats(rewards: np.ndarray) -> GroupStats:
    """Describe a batch of rewards, float[G, n]; raises ValueError as ``grpo_advantages`` does."""
    rewards = _checked(rewards)
    flat_groups = _zero_variance(rewards)
    ddof = 1 if rewards.shape[1] > 1 else 0
    return GroupStats(
        num_groups=int(rewards.shape[0]),
        num_zero_variance=int(flat_groups.sum()),
        num_all_best=int((flat_groups & (rewards[:, 0] == rewards.max())).sum()),
        mean=float(rewards.mean()),
        std=float(rewards.std()),
        min=float(rewards.min()),
        max=float(rewards.max()),
        group_std_mean=float(rewards.std(axis=1, ddof=ddof).mean()),
    )


def token_advantages(advantage: float, loss_mask: np.ndarray) -> np.ndarray:
    """Give every trained token its sample's advantage.

    loss_mask: bool[T].  Returns float32[T], 0 outside the mask.  The sum over tokens is not
    divided by the response's length: the caller normalises by the global number of loss tokens.
    """
    if loss_mask.dtype != np.bool_ or loss_mask.ndim != 1:
        raise ValueError(f"loss_mask is {loss_mask.dtype}{list(loss_mask.shape)}, expected bool[T]")
    return np.where(loss_mask, np.float32(advantage), np.float32(0.0))


def _zero_variance(rewards: np.ndarray) -> np.ndarray:
    return rewards.max(axis=1) == rewards.min(axis=1)


def _checked(rewards: np.ndarray) -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)}, expected [groups, samples], neither 0"
        )
    bad = np.argwhere(~np.isfinite(rewards))
    if len(bad):
        group, sample = (int(i) for i in bad[0])
        raise ValueError(
            f"the reward of sample {sample} in group {group} is {rewards[group, sample]}, "
            f"expected a finite number ({len(bad)} such rewards in the batch)"
        )
    return rewards

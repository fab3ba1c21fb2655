"""The policy loss, token by token, on flat tensors of n rows.

Losses and metrics are sums over the masked rows: the caller divides by the number of loss tokens
of the whole step, over all microbatches and ranks, so that a token weighs the same wherever it
was packed.  Nothing here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from r3train.algo.corrections import log_prob_gap_sums
from r3train.algo.divergence import k3_kl, log_ratio, zero_outside

__all__ = ["PolicyLoss", "k3_kl", "log_ratio_clip_loss", "policy_loss"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of some rows and what is worth knowing about it.

    ``loss`` carries the gradient.  ``sums`` and ``maxima`` are detached scalars on the same
    device; reduce them over ranks with SUM and MAX, then divide sums by ``sums["num_tokens"]``.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def log_ratio_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate for each token: ``-min(r A, clip(r, 1 - eps, 1 + eps_high) A)``.

    log_probs (with gradient), old_log_probs, advantages: float[n]; r = exp(log_probs - old).
    Returns (loss float[n], clipped bool[n]): a row is clipped where the bound is what counts, which
    is r > 1 + eps_high with A > 0 and r < 1 - eps with A < 0; there the gradient is 0.  Elsewhere it
    is -r A.  The caller masks its rows first.
    Source: PPO, arXiv 1707.06347, equation 7; separate bounds from DAPO, arXiv 2503.14476.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    return torch.maximum(unclipped, bounded), bounded.detach() > unclipped.detach()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    rollout_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    tis_weights: Tensor | None = None,
) -> PolicyLoss:
    """Sum ``tis * pg + kl_loss_coef * k3 - entropy_coef * entropy`` over the masked rows.

    All tensors float[n] but mask, bool[n]; rows outside the mask may hold anything, NaN and -inf
    included, and give neither loss nor gradient.  A mask without a True gives a loss of 0 that
    still reaches log_probs, so backward works on a rank that holds padding alone.
    Gradients flow through log_probs and, with entropy_coef, through entropy.

    ``sums``: num_tokens, loss, pg_loss, clipped, ratio, ppo_kl (k1: old - new); kl where
    ref_log_probs, entropy where entropy, and the log_prob_gap_* of corrections.py (old against
    rollout) where rollout_log_probs is given.  ``maxima``: log_prob_gap_max.
    Raises ValueError for a coefficient whose tensor is missing.
    """
    if kl_loss_coef and ref_log_probs is None:
        raise ValueError(f"kl_loss_coef is {kl_loss_coef}, expected ref_log_probs with it")
    if entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef is {entropy_coef}, expected entropy with it")
    given = (
        old_log_probs,
        advantages,
        mask,
        rollout_log_probs,
        ref_log_probs,
        entropy,
        tis_weights,
    )
    assert all(t is None or t.shape == log_probs.shape for t in given), [
        None if t is None else tuple(t.shape) for t in (log_probs, *given)
    ]
    assert mask.dtype == torch.bool, mask.dtype

    new = zero_outside(log_probs, mask)
    old = zero_outside(old_log_probs.detach(), mask)
    pg_loss, clipped = log_ratio_clip_loss(
        new, old, zero_outside(advantages, mask), eps_clip, eps_clip_high
    )
    if tis_weights is not None:
        pg_loss = pg_loss * zero_outside(tis_weights.detach(), mask)
    loss = pg_loss.sum()
    sums = {
        "num_tokens": mask.sum(),
        "pg_loss": loss.detach(),
        "clipped": (clipped & mask).sum(),
        "ratio": zero_outside(log_ratio(new.detach(), old).exp(), mask).sum(),
        "ppo_kl": (old - new.detach()).sum(),
    }
    maxima: dict[str, Tensor] = {}

    if ref_log_probs is not None:
        kl = k3_kl(new, zero_outside(ref_log_probs.detach(), mask)).sum()
        sums["kl"] = kl.detach()
        if kl_loss_coef:
            loss = loss + kl_loss_coef * kl
    if entropy is not None:
        entropy_sum = zero_outside(entropy, mask).sum()
        sums["entropy"] = entropy_sum.detach()
        if entropy_coef:
            loss = loss - entropy_coef * entropy_sum
    if rollout_log_probs is not None:
        gap = log_prob_gap_sums(old, rollout_log_probs, mask)
        maxima["log_prob_gap_max"] = gap.pop("log_prob_gap_max")
        sums.update(gap)
    sums["loss"] = loss.detach()
    return PolicyLoss(loss=loss, sums=sums, maxima=maxima)

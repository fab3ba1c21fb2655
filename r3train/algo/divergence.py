"""Masking that no garbage survives, and estimators of KL: shared by losses and corrections."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is about 5e8: far beyond any ratio that a healthy run sees, and still finite in float32
# after a sum over millions of tokens.  Past it a ratio stops growing and carries no gradient.
MAX_LOG_RATIO = 20.0


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Put 0 wherever the mask is False, in the values and in their gradient.

    values: float[n], mask: bool[n].  Padding rows may hold -inf or NaN, and 0 * NaN is NaN, so a
    mask is applied by selection and *before* any arithmetic, never by multiplication after it.
    """
    return values.masked_fill(~mask, 0.0)


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p / q) of two log-probabilities, held within +-MAX_LOG_RATIO so that exp stays finite."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) for each token, from tokens that the policy sampled.

    log_probs, ref_log_probs: float[n].  Returns float[n], every entry >= 0 and 0 where they agree:
    ``exp(ref - lp) - (ref - lp) - 1``.  Its gradient to log_probs is ``1 - exp(ref - lp)``.
    Source: J. Schulman, "Approximating KL Divergence" (2020), the unbiased low-variance estimator
    k3; used by GRPO, arXiv 2402.03300, equation 4.
    """
    difference = log_ratio(ref_log_probs, log_probs)
    # expm1: near 0 float32 would keep the rounding of exp and lose the difference
    return torch.expm1(difference) - difference


def kl_estimate(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) for each token, float[n]; r = log_probs - ref_log_probs.

    k1: r.  k2: r^2 / 2.  k3: see ``k3_kl``.  k3+: the value of k3 with the gradient of k2, for k2's
    gradient is that of the KL itself and k3's is not.
    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    ratio = log_ratio(log_probs, ref_log_probs)
    if kind == "k1":
        return ratio
    if kind == "k2":
        return ratio.square() / 2
    k3 = k3_kl(log_probs, ref_log_probs)
    if kind == "k3":
        return k3
    assert kind == "k3+", kind
    k2 = ratio.square() / 2
    return k3.detach() + k2 - k2.detach()

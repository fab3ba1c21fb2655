"""Bounds of sampled tokens and their log-probs, for all that reads them: answers, checkpoints, dumps."""

from __future__ import annotations

import numpy as np

from r3train.types import RolloutSample

# A log-prob is at most 0.  A sum of rounded probabilities is a little above 1, so this much is left as it is;
# float32 over 256k tokens errs by 1e-6.
LARGEST_LOG_PROB = 1e-4
# Nobody samples per token of probability e**-10000.  A text of another model, scored at temperature 1, has
# log-probs of -100 at most.
SMALLEST_LOG_PROB = -1e4


def outside_vocabulary(ids: np.ndarray, vocab_size: int) -> str | None:
    """Name the first of ids, int[N], that is no token; None if all are."""
    if not len(ids) or 0 <= ids.min() <= ids.max() < vocab_size:
        return None
    at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    return f"token {at} is {int(ids[at])}, expected 0 to {vocab_size - 1}"


def no_log_prob(values: np.ndarray) -> str | None:
    """Name the first of values, float[N], that cannot be a log-prob; None if all can.

    NaN and infinities cannot, nor what lies outside of SMALLEST_LOG_PROB to LARGEST_LOG_PROB.
    """
    if not len(values) or SMALLEST_LOG_PROB <= values.min() <= values.max() <= LARGEST_LOG_PROB:
        return None
    fits = (values >= SMALLEST_LOG_PROB) & (values <= LARGEST_LOG_PROB)
    at = int(np.argmin(fits))
    return (
        f"log-prob {at} is {values[at]:g}, expected a number from {SMALLEST_LOG_PROB:g} to"
        f" {LARGEST_LOG_PROB:g}"
    )


def flaw(sample: RolloutSample, vocab_size: int) -> str | None:
    """Say what of a sample that was read from a file cannot have been sampled; None if nothing.

    vocab_size: of the model.  The readers of answers refuse the same.
    """
    found = outside_vocabulary(sample.token_ids, vocab_size)
    if found is None:
        found = no_log_prob(sample.rollout_log_probs)
    if found is None and sample.mask_ids is not None:
        kept = outside_vocabulary(sample.mask_ids, vocab_size)
        found = kept and f"sampling mask: {kept}"
    if found is None and sample.teacher_log_probs is not None:
        scored = no_log_prob(sample.teacher_log_probs)
        found = scored and f"the teacher's {scored}"
    return found

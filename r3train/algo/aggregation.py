"""The weight of an episode's rows in the loss."""

from __future__ import annotations

import numpy as np

from r3train.config.algorithm_settings import AlgorithmSection


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

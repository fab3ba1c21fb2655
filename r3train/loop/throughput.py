"""The speed of training: model FLOPs a second, and their share of what the GPUs can do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.hf_checkpoint import trained_tensors


class TrainSpeed:
    """Metrics of a rollout's training, from the tokens that it trained and the seconds that it took.

    Model FLOPs of a forward pass over T tokens are 2 A T for A active parameters in matrices (those of an
    expert count by top-k over experts, the embedding not at all), and 2 T^2 a for each attention layer of
    a values, causal.  Those of the output layer count for tokens with loss alone: no others go through it.
    A training step is three forwards (two with a frozen base), a log-prob pass is one; what is recomputed to
    save memory does not count.
    Source: A. Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.
    """

    def __init__(self, config: RunConfig, hf: HfModelFacts, num_ranks: int) -> None:
        shapes = {name: kind.shape for name, kind in trained_tensors(hf).items()}
        self._params, self._attention = active_parameters(shapes, hf), attention_width(shapes)
        self._output_layer = hf.vocab_size * hf.hidden_size
        self.forwards = forward_passes(config)
        self._num_ranks, self._peak = num_ranks, config.trainer.peak_tflops

    def metrics(self, lengths: np.ndarray, loss_tokens: int, train_s: float) -> dict[str, float]:
        """Metrics of samples of these lengths, int[B], that were trained in ``train_s`` seconds.

        loss_tokens: those of all samples that are in the loss.
        """
        lengths = lengths.astype(np.float64)
        forward = 2 * self._params * lengths.sum() + 2 * self._attention * np.square(lengths).sum()
        forward -= 2 * self._output_layer * (lengths.sum() - loss_tokens)
        tflops = self.forwards * forward / train_s / self._num_ranks / 1e12
        found = {
            "perf/train_tokens_per_s_per_gpu": lengths.sum() / train_s / self._num_ranks,
            "perf/train_tflops_per_gpu": tflops,
        }
        return found if self._peak is None else found | {"perf/mfu": tflops / self._peak}


def forward_passes(config: RunConfig) -> int:
    """Count the forward passes of a rollout's training, a backward as two."""
    algorithm = config.algorithm
    log_prob_passes = (not config.reuses_log_probs) + algorithm.needs_reference
    return (2 if config.lora.enabled else 3) + log_prob_passes + algorithm.holds_teacher


def active_parameters(shapes: Mapping[str, tuple[int, ...]], hf: HfModelFacts) -> float:
    """Count the parameters of matrices that one token is multiplied with.

    shapes: of a checkpoint's tensors by name.  A tied embedding is the output layer too, and counts.
    """
    active = 0.0
    for name, shape in shapes.items():
        is_embedding = name.endswith(("embed_tokens.weight", "embeddings.weight"))
        if len(shape) < 2 or (is_embedding and not hf.tie_word_embeddings):
            continue
        is_expert = re.search(r"\.experts\.", name) is not None
        active += prod(shape) * (hf.num_experts_per_tok / hf.num_experts if is_expert else 1)
    return active


def attention_width(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Add up the values of all heads, over the layers with softmax attention."""
    return sum(shape[1] for name, shape in shapes.items() if name.endswith(".o_proj.weight"))

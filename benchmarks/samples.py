"""Samples and routes of any shape, for benchmarks that need their sizes alone."""

from __future__ import annotations

import numpy as np
import pybase64

from r3train.types import Prompt, RolloutSample, TrainSample


def route_payload(num_rows: int, num_layers: int, topk: int, num_experts: int) -> bytes:
    """Routes of ``num_rows`` tokens as SGLang sends them: base64 of int32[num_rows, L, K]."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, num_experts, (num_rows, num_layers, 1))
    ids = ((first + np.arange(topk)) % num_experts).astype("<i4")  # different ones, as a router's
    return pybase64.b64encode(ids.tobytes())


def sample_of_routes(
    sample_id: int, routes: np.ndarray, *, prompt_len: int = 1, vocab_size: int = 64
) -> TrainSample:
    """A sample of T random tokens with these routes, uint8/uint16 [T-1, L, K].

    All tokens after the prompt are trained; their log-probs are -6 and they share one advantage.
    """
    num_tokens = len(routes) + 1
    generator = np.random.default_rng(sample_id)
    trained = np.arange(num_tokens) >= prompt_len
    sample = RolloutSample(
        sample_id=sample_id,
        group_id=sample_id,
        prompt=Prompt("p", sample_id, "", np.zeros(prompt_len, np.int32), None),
        token_ids=generator.integers(3, vocab_size, num_tokens).astype(np.int32),
        prompt_len=prompt_len,
        loss_mask=trained,
        rollout_log_probs=np.where(trained, -6.0, 0).astype(np.float32),
        routed_experts=routes,
        weight_versions=np.zeros(num_tokens, np.int32),
        finish_reason="stop",
    )
    advantages = np.where(trained, generator.standard_normal(), 0).astype(np.float32)
    return TrainSample(sample, reward=0.0, advantages=advantages)

"""Samples and routes of any shape, for the benchmarks of the route path: their sizes alone matter."""

from __future__ import annotations

import numpy as np
import pybase64

from r3train.types import Prompt, RolloutSample, TrainSample


def route_payload(num_rows: int, num_layers: int, topk: int, num_experts: int) -> bytes:
    """What SGLang sends of ``num_rows`` tokens' routes: base64 of int32[num_rows, L, K]."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, num_experts, (num_rows, num_layers, topk)).astype("<i4")
    return pybase64.b64encode(ids.tobytes())


def sample_of_routes(sample_id: int, routes: np.ndarray) -> TrainSample:
    """A sample of T tokens with these routes, uint8/uint16 [T-1, L, K]; all but the first trained."""
    num_tokens = len(routes) + 1
    zeros = np.zeros(num_tokens, np.float32)
    sample = RolloutSample(
        sample_id=sample_id,
        group_id=sample_id,
        prompt=Prompt("p", sample_id, "", np.zeros(1, np.int32), None),
        token_ids=np.zeros(num_tokens, np.int32),
        prompt_len=1,
        loss_mask=np.arange(num_tokens) >= 1,
        rollout_log_probs=zeros,
        routed_experts=routes,
        weight_versions=np.zeros(num_tokens, np.int32),
        finish_reason="stop",
    )
    return TrainSample(sample, reward=0.0, advantages=zeros)

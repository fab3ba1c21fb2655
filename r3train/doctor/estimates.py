"""What a configuration will take: GPU memory a rank, bytes of routes a sample and a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.doctor.finding import Finding, amount, fact
from r3train.doctor.model import Weights

# of a rank or a server before it holds anything: torch, Megatron, SGLang
PROCESS_BYTES = 1 << 29


@dataclass(frozen=True)
class Estimate:
    """Bytes; activations are not in it."""

    rank_bytes: float  # weights, gradients and optimizer state of one rank, where it computes
    reference_bytes: (
        float  # of one rank on the host: the KL reference, and the actor's while it runs
    )
    checkpoint_bytes: float  # one training checkpoint
    route_row_bytes: int  # one token's routes of all layers, as the trainer keeps them
    sample_tokens: int  # the longest sample
    sample_bytes: int  # its routes
    sample_wire_bytes: int  # its routes as the engine sends them: int32 in base64
    step_bytes: int  # routes of a rollout of such samples, on rank 0


def estimate(config: RunConfig, hf: HfModelFacts, weights: Weights, world_size: int) -> Estimate:
    """Mixed precision keeps float32 masters, gradients and two moments beside bfloat16 weights."""
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or 1
    dense = weights.dense / (tp * pp)
    expert = weights.expert / (parallel.expert_model_parallel_size * etp * pp)
    weight_bytes = 2 if config.model.bf16 else 4
    state = (8 if config.trainer.optimizer == "adam" else 0) + (4 if config.model.bf16 else 0)
    ways = expert_ways = 1
    if parallel.use_distributed_optimizer:
        ways = max(1, world_size // (tp * pp))  # context parallelism shards it too
        expert_ways = max(1, world_size // (parallel.expert_ranks))
    rank_bytes = dense * (weight_bytes + 4 + state / ways)
    rank_bytes += expert * (weight_bytes + 4 + state / expert_ways)
    reference_bytes = 0.0
    if config.algorithm.needs_reference:
        reference_bytes = 2 * (dense + expert) * weight_bytes
    context = config.rollout.rollout_max_context_len or hf.max_position_embeddings
    prompt = config.rollout.rollout_max_prompt_len or context
    tokens = min(context, prompt + config.rollout.rollout_max_response_len)
    row = hf.num_hidden_layers * hf.num_experts_per_tok
    row_bytes = row * hf.route_shape.dtype.itemsize if hf.is_moe else 0
    return Estimate(
        rank_bytes=rank_bytes,
        reference_bytes=reference_bytes,
        checkpoint_bytes=weights.total * (weight_bytes + state),
        route_row_bytes=row_bytes,
        sample_tokens=tokens,
        sample_bytes=(tokens - 1) * row_bytes,
        sample_wire_bytes=(tokens - 1) * row * 4 * 4 // 3 if hf.is_moe else 0,
        step_bytes=(tokens - 1) * row_bytes * config.samples_per_rollout,
    )


def describe(e: Estimate, config: RunConfig) -> Iterator[Finding]:
    """The estimate in words."""
    text = f"{amount(e.rank_bytes)} a rank for weights, gradients and optimizer; activations on top"
    yield fact("memory estimate", text)
    if config.replay.use_rollout_routing_replay and e.route_row_bytes:
        yield fact(
            "route estimate",
            f"{e.route_row_bytes} B a token; a sample of {e.sample_tokens} tokens "
            f"{amount(e.sample_bytes)} ({amount(e.sample_wire_bytes)} on the wire); at most "
            f"{amount(e.step_bytes)} a rollout on rank 0",
        )

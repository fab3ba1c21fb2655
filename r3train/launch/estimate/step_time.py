"""Seconds of a step on paper: a formula for each part, with assumed rates (docs/run/gpus.md, A step in seconds)."""

from __future__ import annotations

from dataclasses import dataclass

from r3train.config import RunConfig
from r3train.families import has_fused_experts, tensor_shapes
from r3train.launch.estimate.memory_use import (
    amount,
    GIGA,
    Held,
    Model,
    OFFLOADED_BYTES,
    ServerEstimate,
)
from r3train.launch.estimate.memory_use import gpus_in_words, server_bytes
from r3train.loop.throughput import active_parameters, attention_width, forward_passes

# by a GPU's memory in 10^9 bytes: the card, its FLOP/s in bfloat16, bytes per second of its memory
_CARDS = {
    24: ("RTX 4090", 165e12, 1.01e12),
    80: ("H100", 989e12, 3.35e12),
    141: ("H200", 989e12, 4.8e12),
    192: ("B200", 2250e12, 8e12),
}
# what training reaches of the FLOP/s, and decoding of the memory's rate; seconds of an all-reduce
_FLOPS_SHARE, _MEMORY_SHARE, _REDUCE_S = 0.15, 0.8, 20e-6
# per second: bytes of routes out of a server, bytes to or from the host, parameters of an AdamW there, bytes of weights
_ROUTES, _HOST, _ADAM = 0.38e9, 20e9, 1.5e9
_SENT = {"distributed": 40e9, "disk": 1e9}
_PAGEABLE = 6e9  # bytes per second into a GPU out of memory that its process has not pinned
_POINTS = 256  # at which a rollout's decoding is summed


@dataclass(frozen=True)
class StepTime:
    """A step: its parts as (name, seconds, words), all of it, and its tokens of answers per second and GPU."""

    card: str
    parts: list[tuple[str, float, str]]
    seconds: float
    rate: float


def step_time(
    config: RunConfig,
    model: Model,
    held: Held,
    server: ServerEstimate,
    ranks: int,
    gpu_bytes: float,
) -> StepTime:
    """Return the time of a step of so many ranks; held: by the fullest; gpu_bytes: of a GPU, for its card."""
    rollout, trainer, hf = config.rollout, config.trainer, model.hf
    card, flops, bandwidth = _CARDS[min(_CARDS, key=lambda gb: abs(gb * GIGA - gpu_bytes))]
    flops = _FLOPS_SHARE * (trainer.peak_tflops * 1e12 if trainer.peak_tflops else flops)
    servers = len(rollout.rollout_external_engine_addrs) or rollout.rollout_num_engines
    samples, longest = config.samples_per_rollout, rollout.rollout_max_response_len
    at_once, generation = _generation(model, server, samples / servers, longest, bandwidth)
    route = longest / 2 * hf.num_hidden_layers * hf.num_experts_per_tok * 4 * 4 / 3
    route *= config.replay.use_rollout_routing_replay
    # sums over the answers' tokens, and over the squares of their lengths
    forward = active_parameters(shapes := tensor_shapes(hf), hf) * samples * longest
    forward += attention_width(shapes) * samples * longest**2 * 2 / 3
    passes = forward_passes(config) + (config.model.recompute_granularity == "full")
    adam = held.offloaded / OFFLOADED_BYTES * config.steps_per_rollout
    away = (held.weights + held.optimizer) * rollout.colocate
    weights, mode = server_bytes(config, model), trainer.update_weight_transfer_mode
    if mode == "shared_memory":
        publish = _by_memory(config, model, weights, server.gpus)
    else:
        publish = weights / _SENT[mode]
    size = f"{servers} x {gpus_in_words(server.gpus)}, {at_once:,.0f} answers at once on each"
    rate = f"{flops / 1e12:.0f} TFLOP/s a GPU"
    parts = [
        ("generation", generation, f"{size}; ends with the longest, {longest:,} tokens"),
        ("routes out", route * samples / servers / _ROUTES, f"{amount(route)} an answer"),
        ("training", passes * forward / ranks / flops, f"{passes} passes at {rate}, backward 2"),
        ("Adam on the host", adam / _ADAM, f"{adam / GIGA:.1f} billion parameters a rank"),
        ("turns", 2 * away / _HOST, f"{amount(away)} a rank to the host and back"),
        ("publish", publish, f"{amount(weights)} by {mode}"),
    ]
    generation, out, *training, publish = (seconds for _, seconds, _ in parts)
    sides = generation + out, sum(training)
    seconds = publish + (max if rollout.max_weight_staleness else sum)(sides)
    gpus = ranks + servers * server.gpus * (not rollout.colocate)
    return StepTime(card, parts, seconds, samples * longest / 2 / seconds / gpus)


def _by_memory(config: RunConfig, model: Model, weights: float, server_gpus: int) -> float:
    """Return the seconds until servers have weights of so many bytes from shared memory.

    Every expert-parallel rank writes its experts, a pipeline stage's first rank the rest; then each GPU of a server
    reads its share.
    """
    parallel, hf = config.parallel, model.hf
    experts = weights * model.total.expert / model.total.total
    ranks = 1 if has_fused_experts(hf.path) else parallel.expert_model_parallel_size
    written = (weights - experts + experts / ranks) / parallel.pipeline_model_parallel_size
    return written / _HOST + weights / server_gpus / _PAGEABLE


def _generation(
    model: Model, server: ServerEstimate, answers: float, longest: int, bandwidth: float
) -> tuple[float, float]:
    """Return the answers that a server decodes at once, and the seconds until the last of its ``answers`` ends."""
    hf, expert_share = model.hf, model.total.expert / model.total.total
    reduces = 2 * hf.num_hidden_layers * _REDUCE_S * (server.gpus > 1)

    def token_s(running: float, context: float) -> float:
        unused = (1 - hf.num_experts_per_tok / max(1, hf.num_experts)) ** running
        read = server.weights * (1 - expert_share * unused) + running * context * server.token_bytes
        return read / (_MEMORY_SHARE * bandwidth) + reduces

    at_once = max(1.0, min(answers, server.in_flight, server.pool_tokens / (longest / 2)))
    seconds = (answers - at_once) * longest / 2 / at_once * token_s(at_once, longest / 3)
    for done in (point / _POINTS for point in range(_POINTS)):
        seconds += longest / _POINTS * token_s(at_once * (1 - done), longest * done)
    return at_once, seconds

"""A run estimated: memory of every rank and server, and seconds of a step, each with what it assumes.

Bytes of weights, gradients, optimizer and logits are those of ``memory``.  Nothing here is measured:
the numbers say what cannot fit and which part will be long, not how fast a run will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import TYPE_CHECKING

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts, load_model_config
from r3train.doctor.finding import amount
from r3train.doctor.memory import (
    OFFLOADED_BYTES,
    StageRanks,
    check_evidence_room,
    longest_sample,
    route_estimate,
    server_fraction,
    stages,
)
from r3train.doctor.model_checks import read_stages
from r3train.launch.gpus import server_size

if TYPE_CHECKING:
    from r3train.config.rollout_settings import RolloutSection
    from r3train.hf_checkpoint import TensorKind

GIGA = 10**9
# of an H100 with 80 GB, and what is assumed to come of it
GPU_GB = 80.0
PEAK_TFLOPS = 989.0
TRAIN_SHARE = 0.4
MEMORY_GB_S = 3350.0
DECODE_SHARE = 0.5
LEAST_TOKEN_S = 0.005
# of weights from one sender: by NCCL to all receivers at once; the others as measured on one core, by gloo to one
# receiver (docs/internals/scale.md), by memory and files to one server (docs/internals/performance.md)
NCCL_GB_S = 40.0
GLOO_GB_S = 0.9
SHARED_MEMORY_GB_S = 3.2
DISK_GB_S = 1.5
# of an Adam on the host: parameters of one thread as measured (torch's fused AdamW), and what bounds all of a node
ADAM_PARAMS_S = 0.19 * GIGA
ADAM_BYTES = 28  # reads and writes of a parameter's weight, gradient and moments
HOST_GB_S = 300.0
HOST_CORES = 96
NODE_GPUS = 8
# of a server's GPU before it loads anything: CUDA's context, NCCL's buffers
_SERVER_BYTES = 2 << 30
_MOST_TP = 64
# tokens in SGLang's pool of a sliding window's layers for one in that of the others (--sglang-swa-full-tokens-ratio)
_WINDOW_SHARE = 0.8


@dataclass(frozen=True)
class ServerEstimate:
    """One server: its GPUs, bytes on each of them, and tokens of its KV pool."""

    gpus: int
    is_given: bool  # the configuration says how many GPUs
    weights: float  # bytes of a GPU
    token_bytes: float  # of the pool, of a GPU
    pool_tokens: int
    in_flight: int  # requests, as the run sends them
    needed_tokens: int  # of all of these at their full length


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one rollout's parts."""

    generation_s: float
    train_s: float
    optimizer_s: float  # of an Adam on the host, 0 on the device
    update_s: float
    total_s: float


@dataclass(frozen=True)
class UpdatePaper:
    """The way of new weights to the servers: its name, and GB/s for all receivers together."""

    way: str
    gb_s: float


def update_on_paper(config: RunConfig, receivers: int) -> UpdatePaper:
    """The transport of new weights.  receivers: GPUs of all servers; each takes part in a broadcast."""
    mode = config.trainer.update_weight_transfer_mode
    if mode != "distributed":
        rate = SHARED_MEMORY_GB_S if mode == "shared_memory" else DISK_GB_S
        return UpdatePaper(f"by {mode}", rate)
    if not config.rollout.colocate:
        return UpdatePaper("by NCCL", NCCL_GB_S)
    # its broadcast is a tree: the sender sends whole buckets once a level
    sends = ceil(log2(receivers + 1))
    to = f"to {receivers} receiver{'s' * (receivers != 1)}, {sends} sends of {GLOO_GB_S} GB/s"
    return UpdatePaper(f"by gloo {to}", GLOO_GB_S / sends)


def host_adam_s(config: RunConfig, ranks: list[StageRanks], world_size: int) -> float:
    """Seconds of the optimizer steps of one rollout, where Adam's state is on the host; else 0."""
    if not config.trainer.optimizer_overrides.get("optimizer_cpu_offload"):
        return 0.0
    most = max(stage.held.offloaded for stage in ranks) / OFFLOADED_BYTES
    here = min(world_size, NODE_GPUS)
    bound = HOST_GB_S * GIGA / ADAM_BYTES / here
    rate = min(HOST_CORES // here * ADAM_PARAMS_S, bound)
    return config.steps_per_rollout * most / rate


def paper(
    config: RunConfig,
    hf: HfModelFacts,
    world_size: int,
    longest_prompt: int,
    gpu_bytes: float = 0.0,
) -> Iterator[str]:
    """Yield the lines; longest_prompt: its tokens, or a conversation's.  gpu_bytes: of the GPUs here, 0 where there are none.

    Raises ValueError for a checkpoint that cannot be read.
    """
    given_gb = config.run.gpu_memory_gb
    if given_gb is not None or not gpu_bytes:
        gpu_bytes = (given_gb or GPU_GB) * GIGA
    yield (
        f"estimated, nothing of it measured (docs/gpu.md); a GPU of {gpu_bytes / GIGA:,.0f} GB is"
        f" {amount(gpu_bytes)}"
    )
    ranks = stages(config, hf, world_size)
    for stage in ranks:
        yield _stage_line(stage, gpu_bytes)
    yield from _rank_assumptions(config, ranks)
    if config.replay.use_rollout_routing_replay and hf.is_moe:
        held = config.rollout.buffer_groups * config.rollout.n_samples_per_prompt
        yield f"routes on the host of rank 0: {route_estimate(config, hf).text}"
        yield (
            f"  assumed: every sample is as long as allowed; the buffer may hold {held:,} samples,"
            f" {held / config.samples_per_rollout:.2g} rollouts (--max-weight-staleness)"
        )
    if config.r3_check_enabled and hf.is_moe:
        evidence = check_evidence_room(config, hf, world_size, inf)
        yield f"evidence on disk, below the run directory: {evidence.text}"
    server = None
    if config.has_engines:
        server = estimate_server(config, hf, longest_prompt, gpu_bytes)
        yield from _server_lines(config, server, gpu_bytes)
    yield from _step_lines(config, hf, world_size, longest_prompt, server)


def estimate_server(
    config: RunConfig, hf: HfModelFacts, longest_prompt: int, gpu_bytes: float
) -> ServerEstimate:
    """One server of the run: those of several GPUs split weights and keys, and every GPU has all of MLA's."""
    kinds = {name: kind for stage in read_stages(config, hf) for name, kind in stage.items()}
    value = 2 if config.model.bf16 else 4
    weights = sum(kind.num_elements for kind in kinds.values()) * value
    rollout = config.rollout
    budget = server_fraction(config, gpu_bytes) * gpu_bytes - _SERVER_BYTES
    gpus, is_given = server_size(rollout.sglang), True
    if gpus is None:  # the fewest that leave a third of their room to the pool
        gpus, is_given = 1, False
        while weights / gpus > budget * 2 / 3 and gpus < _MOST_TP:
            gpus *= 2
    held = _held_shares(rollout.sglang, hf)
    latent = _rows(kinds, ("kv_a_proj_with_mqa",), held)
    keys = _rows(kinds, ("k_proj", "v_proj"), held)
    split = min(gpus, hf.num_key_value_heads)
    token_bytes = (latent + keys / split) * value
    pool = max(0, int((budget - weights / gpus) / token_bytes)) if token_bytes else 0
    if type(most := rollout.sglang.get("max_total_tokens")) is int:
        pool = min(pool, most)
    num_servers = _num_servers(rollout)
    return ServerEstimate(
        gpus=gpus,
        is_given=is_given,
        weights=weights / gpus,
        token_bytes=token_bytes,
        pool_tokens=pool,
        in_flight=ceil(rollout.most_in_flight / num_servers),
        needed_tokens=ceil(
            rollout.most_in_flight * longest_sample(config, hf, longest_prompt) / num_servers
        ),
    )


def _num_servers(rollout: RolloutSection) -> int:
    return len(rollout.rollout_external_engine_addrs) or rollout.rollout_num_engines


def _held_shares(sglang: Mapping[str, object], hf: HfModelFacts) -> list[float]:
    """Tokens that the pool holds in each layer for one token in the layers of full attention.

    Source: SGLang 0.5.23, ``HybridSWAPoolConfigurator``: layers of a sliding window have a smaller pool.
    """
    types = load_model_config(hf.path).get("layer_types") or []
    of_window = sglang.get("swa_full_tokens_ratio") or _WINDOW_SHARE
    if sglang.get("disable_hybrid_swa_memory") or type(of_window) is not float:
        of_window = 1.0
    slides = [
        "sliding" in types[i] if i < len(types) else False for i in range(hf.num_hidden_layers)
    ]
    return [of_window if one and not all(slides) else 1.0 for one in slides]


def _rows(
    kinds: Mapping[str, TensorKind], modules: tuple[str, ...], shares: Sequence[float]
) -> float:
    """Sum the outputs of these modules of attention over layers, each as often as its share."""
    found = 0.0
    for name, kind in kinds.items():
        if name.endswith(tuple(f"self_attn.{module}.weight" for module in modules)):
            layer = int(name.partition(".layers.")[2].partition(".")[0])
            found += kind.shape[0] * shares[layer]
    return found


def estimate_step(
    config: RunConfig,
    hf: HfModelFacts,
    world_size: int,
    tokens: int,
    server: ServerEstimate | None,
) -> StepEstimate:
    """Seconds of a rollout of samples of ``tokens`` tokens each."""
    import numpy as np

    from r3train.loop.throughput import TrainSpeed

    speed = TrainSpeed(config, hf, world_size)
    lengths = np.full(config.samples_per_rollout, tokens)
    work = speed.metrics(lengths, 1.0)["perf/train_tflops_per_gpu"]
    if config.model.recompute_granularity == "full":
        work *= (speed.forwards + 1) / speed.forwards
    train_s = work / ((config.trainer.peak_tflops or PEAK_TFLOPS) * TRAIN_SHARE)
    optimizer_s = host_adam_s(config, stages(config, hf, world_size), world_size)
    if server is None:
        return StepEstimate(0.0, train_s, optimizer_s, 0.0, train_s + optimizer_s)
    rollout = config.rollout
    num_servers = _num_servers(rollout)
    response = rollout.rollout_max_response_len
    fitting = server.pool_tokens // tokens
    at_once = max(1, min(server.in_flight, fitting))
    read = server.weights + at_once * (tokens - response / 2) * server.token_bytes
    token_s = max(LEAST_TOKEN_S, read / (MEMORY_GB_S * GIGA * DECODE_SHARE))
    waves = config.samples_per_rollout / (num_servers * at_once)
    generation_s = max(1.0, waves) * response * token_s
    update = update_on_paper(config, server.gpus * num_servers)
    update_s = server.weights * server.gpus / (update.gb_s * GIGA)
    learning_s = train_s + optimizer_s
    both = max(generation_s, learning_s)
    if rollout.max_weight_staleness == 0:
        both = generation_s + learning_s
    return StepEstimate(generation_s, train_s, optimizer_s, update_s, both + update_s)


def _stage_line(stage: StageRanks, gpu_bytes: float) -> str:
    ranks, layers, held = stage.ranks, stage.layers, stage.held
    parts = {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": stage.activations,
        "a layer's backward": stage.layer,
        "logits": stage.logits,
    }
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks[0]} to {ranks[-1]}"
    what = f"layers {layers[0]} to {layers[-1]}" if layers else "no layer"
    listed = ", ".join(f"{name} {amount(size)}" for name, size in parts.items())
    share = stage.total / gpu_bytes
    verdict = "too much" if share > 1 else f"{share:.0%} of a GPU"
    return f"{who} ({what}): {listed}; {amount(stage.total)} at the peak, {verdict}"


def _rank_assumptions(config: RunConfig, ranks: list[StageRanks]) -> Iterator[str]:
    held = ranks[0].held
    yield (
        f"  assumed: microbatches of --max-tokens-per-gpu {config.trainer.max_tokens_per_gpu:,},"
        " experts chosen alike, attention that keeps no scores; CUDA, NCCL and fragments on top,"
        " 2 to 6 GiB"
    )
    if ranks[0].update > ranks[0].passes:
        yield (
            f"  an update of the servers' weights takes {amount(ranks[0].update)} (three of"
            " --update-weight-buffer-size), more than activations and logits"
        )
    away = held.weights + held.optimizer if config.rollout.colocate else 0
    for what, size in (
        ("reference or teacher", held.reference),
        ("optimizer", held.offloaded),
        ("weights and optimizer while servers generate", away),
    ):
        if size:
            yield f"on the host, a rank: {what} {amount(size)}"


def _server_lines(config: RunConfig, server: ServerEstimate, gpu_bytes: float) -> Iterator[str]:
    share = min(1.0, server.pool_tokens / server.needed_tokens)
    verdict = "all fit" if share == 1 else f"{share:.0%} fit, the others wait"
    yield (
        f"each server, of {server.gpus} GPU{'s' * (server.gpus != 1)}: weights"
        f" {amount(server.weights)} a GPU, a pool of {server.pool_tokens:,} tokens;"
        f" {server.in_flight:,} requests at their full length need {server.needed_tokens:,}: {verdict}"
    )
    size = "--sglang-tp-size" if server.is_given else "the fewest GPUs that leave room for a pool"
    yield (
        f"  assumed: {size}; {server_fraction(config, gpu_bytes):.2f} of {amount(gpu_bytes)} for weights and"
        f" pool, {amount(_SERVER_BYTES)} of it for CUDA and NCCL; {amount(server.token_bytes)} a token"
    )


def _step_lines(
    config: RunConfig,
    hf: HfModelFacts,
    world_size: int,
    longest_prompt: int,
    server: ServerEstimate | None,
) -> Iterator[str]:
    rollout = config.rollout
    longest = longest_prompt  # of conversations: nothing is generated after them
    if not config.learns_conversations:
        longest = longest_sample(config, hf, longest_prompt)
    step = estimate_step(config, hf, world_size, longest, server)
    parts = f"training {step.train_s:,.1f} s"
    if step.optimizer_s:
        parts += f", Adam on the host {step.optimizer_s:,.1f} s"
    if server is not None:
        order = "one after the other" if rollout.max_weight_staleness == 0 else "at the same time"
        parts = (
            f"generation {step.generation_s:,.1f} s, {parts}, weights {step.update_s:,.1f} s;"
            f" {step.total_s:,.1f} s, generation and training {order}"
        )
    yield f"a rollout: {parts}"
    assumed = (
        f"  assumed: {config.samples_per_rollout:,} samples of {longest:,} tokens, the longest there"
        f" can be; training at {TRAIN_SHARE:.0%} of {config.trainer.peak_tflops or PEAK_TFLOPS:,.0f}"
        " TFLOP/s (--peak-tflops)"
    )
    if server is not None:
        update = update_on_paper(config, server.gpus * _num_servers(rollout))
        assumed += (
            f"; a token reads weights and keys at {DECODE_SHARE:.0%} of {MEMORY_GB_S:,.0f} GB/s, in"
            f" {1000 * LEAST_TOKEN_S:.0f} ms at least; weights go {update.way}, {update.gb_s:.2g} GB/s"
        )
    if step.optimizer_s:
        assumed += (
            f"; Adam on the host: {HOST_CORES} cores of a node over its ranks (unless OMP_NUM_THREADS is set),"
            f" {ADAM_PARAMS_S / GIGA} G parameters/s a thread, {HOST_GB_S:.0f} GB/s of a node's memory at most"
        )
    yield assumed

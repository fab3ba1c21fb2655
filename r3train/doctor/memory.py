"""GPU, host and disk bytes that a configuration will take, and whether they are there.

Servers are placed by the training command's own rule (``launch.gpus``): the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.doctor.finding import Finding, Findings, amount, fact, ok, problem, room, warning
from r3train.doctor.machine import Node, check_disk
from r3train.doctor.model import Weights
from r3train.launch.gpus import server_gpus

# of a rank or a server before it holds anything: torch, Megatron, SGLang
PROCESS_BYTES = 1 << 29
# SGLang's own choice leaves 10 GiB of a large GPU, and more for CUDA graphs
_DEFAULT_FRACTION = 0.85
# activations, CUDA's context, the allocator's fragments
_GPU_MARGIN = 0.1
_HOST_MARGIN = 2 << 30


@dataclass(frozen=True)
class Estimate:
    """Bytes; activations are not in it."""

    rank_bytes: float  # weights, gradients and optimizer state of one rank, where it computes
    reference_bytes: float  # of a rank on the host: the KL reference, and the actor meanwhile
    checkpoint_bytes: float  # one training checkpoint
    route_row_bytes: int  # one token's routes of all layers, as the trainer keeps them
    sample_tokens: int  # the longest sample
    sample_bytes: int  # its routes
    sample_wire_bytes: int  # its routes as the engine sends them: int32 in base64
    step_bytes: int  # routes of a rollout of such samples, on rank 0


def estimate(config: RunConfig, hf: HfModelFacts, weights: Weights, world_size: int) -> Estimate:
    """Mixed precision keeps float32 masters, gradients and two moments beside bfloat16 weights."""
    parallel, rollout = config.parallel, config.rollout
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or 1
    dense = weights.dense / (tp * pp)
    expert = weights.expert / (parallel.expert_model_parallel_size * etp * pp)
    weight_bytes = 2 if config.model.bf16 else 4
    state = (8 if config.trainer.optimizer == "adam" else 0) + (4 if config.model.bf16 else 0)
    ways = expert_ways = 1
    if parallel.use_distributed_optimizer:
        ways = max(1, world_size // (tp * pp))  # context parallelism shards it too
        expert_ways = max(1, world_size // parallel.expert_ranks)
    context = rollout.rollout_max_context_len or hf.max_position_embeddings
    prompt = rollout.rollout_max_prompt_len or context
    tokens = min(context, prompt + rollout.rollout_max_response_len)
    slots = hf.num_hidden_layers * hf.num_experts_per_tok if hf.is_moe else 0
    row_bytes = slots * hf.route_shape.dtype.itemsize
    return Estimate(
        rank_bytes=dense * (weight_bytes + 4 + state / ways)
        + expert * (weight_bytes + 4 + state / expert_ways),
        reference_bytes=2.0 * (dense + expert) * weight_bytes * config.algorithm.needs_reference,
        checkpoint_bytes=weights.total * (weight_bytes + state),
        route_row_bytes=row_bytes,
        sample_tokens=tokens,
        sample_bytes=(tokens - 1) * row_bytes,
        sample_wire_bytes=(tokens - 1) * slots * 4 * 4 // 3,
        step_bytes=(tokens - 1) * row_bytes * config.samples_per_rollout,
    )


def describe(e: Estimate, config: RunConfig) -> Findings:
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


def check_room(
    config: RunConfig, hf: HfModelFacts | None, weights: Weights | None, node: Node
) -> Findings:
    """Disk, GPU and host memory for the run; without a readable checkpoint the disk alone."""
    run_dir = config.run.run_dir or Path("runs")
    if hf is None or weights is None:
        yield from check_disk("run directory", run_dir, 1 << 30)
        return
    e = estimate(config, hf, weights, node.world_size)
    by_disk = config.trainer.update_weight_transfer_mode == "disk"
    needed = (256 << 20) + (2 * weights.num_bytes if by_disk else 0)
    yield from check_disk("run directory", run_dir, needed)
    if config.checkpoint.save is not None:
        # the new one is complete before the old one goes
        kept = (config.checkpoint.save_keep_last or 2) + 1
        yield from check_disk("checkpoints", config.checkpoint.save, kept * e.checkpoint_bytes)
    on_host = (node.num_ranks + 1) * PROCESS_BYTES + e.reference_bytes * node.num_ranks
    if node.num_gpus:
        yield from check_gpu_memory(config, e, node)
    else:
        on_host += e.rank_bytes * node.num_ranks + 2 * weights.num_bytes
    yield check_host_memory(psutil.virtual_memory().available, on_host)
    yield from describe(e, config)


def check_host_memory(available_bytes: float, needed_bytes: float) -> Finding:
    """Memory of the host for this node's ranks, and on a CPU machine for the server too."""
    remedy = "fewer ranks, a smaller model, or a machine with more"
    near = "close other programs"
    return room("memory", available_bytes, needed_bytes, remedy, margin=_HOST_MARGIN, near=near)


def check_placement(config: RunConfig, node: Node) -> Findings:
    """The job's servers must have GPUs that no rank has; no finding on a machine without GPUs."""
    if not node.num_gpus:
        return
    try:
        taken = _server_gpus(config, node)
    except ValueError as error:
        remedy = (
            f"docs/slurm.md says who takes which GPU; if fewer than {node.num_ranks} ranks are on this"
            " node, --nproc-per-node says so"
        )
        yield problem("servers", str(error), remedy)
        return
    if shared := [gpu for gpu in taken if gpu < node.num_ranks]:
        text = f"SGLang and a rank share GPU {', '.join(map(str, shared))}: its memory and its time"
        remedy = "--sglang-mem-fraction-static leaves the rank its part; or fewer ranks than GPUs"
        yield warning("servers", text, remedy)
    elif taken:
        yield ok("servers", f"SGLang takes GPU {', '.join(map(str, taken))}, no rank does")


def check_gpu_memory(config: RunConfig, e: Estimate, node: Node) -> Findings:
    """A rank's weights, gradients and optimizer, and SGLang's share, against the GPU they are on."""
    needed, held = e.rank_bytes, f": {amount(e.rank_bytes)} of a rank"
    remedy = "more ranks (expert or pipeline parallel), --use-distributed-optimizer, --bf16"
    try:
        shared = any(gpu < node.num_ranks for gpu in _server_gpus(config, node))
    except ValueError:
        shared = False  # check_placement reports it
    if shared:
        share = _server_fraction(config) * node.gpu_bytes
        needed += share
        held += f", {amount(share)} of SGLang on the same GPU"
        remedy += ", a lower --sglang-mem-fraction-static, or a GPU of its own for SGLang"
    yield room(
        "GPU memory",
        node.gpu_bytes,
        needed,
        remedy,
        text="{has} available, about {needs} needed" + held,
        margin=_GPU_MARGIN * node.gpu_bytes,
        near=f"{remedy}: activations come on top",
    )


def _server_gpus(config: RunConfig, node: Node) -> list[int]:
    """GPUs that the job's servers take.  Raises ValueError where the training command would."""
    servers = server_gpus(config, num_ranks=node.num_ranks, num_visible=node.num_gpus)
    return [gpu for gpus in servers for gpu in gpus]


def _server_fraction(config: RunConfig) -> float:
    """The part of its GPU that SGLang takes."""
    given = [v for k, v in config.rollout.sglang.items() if "mem_fraction_static".startswith(k)]
    try:
        return float(given[0]) if given else _DEFAULT_FRACTION
    except (TypeError, ValueError):
        return _DEFAULT_FRACTION  # SGLang refuses such a flag itself

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

    rank: float  # weights, gradients and optimizer state of one rank, where it computes
    reference: float  # of a rank on the host: KL reference, teacher, and the actor meanwhile
    offloaded: float  # of a rank on the host: the optimizer's state there (optimizer_cpu_offload)
    checkpoint: float  # one training checkpoint


def estimate(config: RunConfig, weights: Weights, world_size: int) -> Estimate:
    """Mixed precision keeps float32 masters, gradients and two moments beside bfloat16 weights.

    With LoRA the adapters have them and the weights have none.  Of an adapter about a half is on every
    tensor rank; all of it is counted.  ``optimizer_overrides`` take less, or the host's.
    """
    parallel, bf16 = config.parallel, config.model.bf16
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or 1
    dense = weights.dense / (tp * pp)
    expert = weights.expert / (parallel.expert_model_parallel_size * etp * pp)
    weight_bytes = 2 if bf16 else 4
    state = (8 if config.trainer.optimizer == "adam" else 0) + (4 if bf16 else 0)
    gradient, held_state, offloaded_state = _optimizer_bytes(config, state)
    ways = expert_ways = 1
    if parallel.use_distributed_optimizer:
        ways = max(1, world_size // (tp * pp))  # context parallelism shards it too
        expert_ways = max(1, world_size // parallel.expert_ranks)
    held = config.algorithm.needs_reference and not config.reference_is_base
    copies = held + config.algorithm.holds_teacher
    reference = (copies + 1.0 if copies else 0.0) * (dense + expert) * weight_bytes
    frozen, trained = 0.0, weights.total
    if config.lora.enabled:
        frozen = (dense + expert) * weight_bytes
        trained = weights.adapter_dense + weights.adapter_expert
        dense = weights.adapter_dense / pp
        expert = weights.adapter_expert / (parallel.expert_model_parallel_size * pp)
    return Estimate(
        rank=frozen
        + dense * (weight_bytes + gradient + held_state / ways)
        + expert * (weight_bytes + gradient + held_state / expert_ways),
        reference=reference,
        offloaded=offloaded_state * (dense / ways + expert / expert_ways),
        checkpoint=trained * (weight_bytes + state),
    )


def _optimizer_bytes(config: RunConfig, state: int) -> tuple[float, float, float]:
    """Bytes a parameter: its gradient, its state where the rank computes, and its state on the host.

    state: those of Megatron's own choice, float32 throughout.
    """
    given = config.trainer.optimizer_overrides
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
    gradient = sizes[str(given.get("main_grads_dtype", "fp32"))]
    if given.get("optimizer_cpu_offload"):  # all of it is on the host, in float32, with a gradient
        return gradient, 0.0, state + 4
    if given.get("use_precision_aware_optimizer"):
        moments = ("exp_avg_dtype", "exp_avg_sq_dtype")
        state = sum(sizes[str(given.get(name, "fp32"))] for name in moments)
        main = sizes[str(given.get("main_params_dtype", "fp32"))]
        # Transformer Engine keeps the half of a float32 that the bfloat16 weight does not have
        is_half = config.model.bf16 and main == 4 and given.get("store_param_remainders", True)
        state += 2 if is_half else main
    return gradient, state, 0.0


def logits_bytes(config: RunConfig, vocab_size: int) -> float:
    """Bytes of the longest microbatch's logits on one rank, with the float32 chunks of the loss."""
    rows, chunk = config.trainer.max_tokens_per_gpu, config.trainer.log_probs_chunk_size
    width = vocab_size / config.parallel.tensor_model_parallel_size
    at_once = min(rows, chunk) if chunk > 0 else rows
    return width * (rows * (2 if config.model.bf16 else 4) + 3 * at_once * 4)


def route_estimate(config: RunConfig, hf: HfModelFacts) -> Finding:
    """Bytes of the routes of a token, of the longest sample, and of a rollout of such samples."""
    rollout, shape = config.rollout, hf.route_shape
    context = rollout.rollout_max_context_len or hf.max_position_embeddings
    prompt = rollout.rollout_max_prompt_len or context
    tokens = min(context, prompt + rollout.rollout_max_response_len)
    slots = hf.num_hidden_layers * hf.num_experts_per_tok
    row = slots * shape.dtype.itemsize
    sample, on_wire = (tokens - 1) * row, (tokens - 1) * slots * 4 * 4 // 3  # int32 in base64
    return fact(
        "route estimate",
        f"{row} B a token; a sample of {tokens} tokens {amount(sample)} ({amount(on_wire)} on the "
        f"wire); at most {amount(sample * config.samples_per_rollout)} a rollout on rank 0",
    )


def check_room(
    config: RunConfig, hf: HfModelFacts | None, weights: Weights | None, node: Node
) -> Findings:
    """GPUs, disk and host memory for the run; without a readable checkpoint less of it."""
    e = estimate(config, weights, node.world_size) if weights is not None else None
    logits = logits_bytes(config, hf.vocab_size) if hf is not None else 0.0
    yield from check_gpus(config, node, e.rank if e else None, logits)
    run_dir = config.run.run_dir or Path("runs")
    logs = {"logs and evidence": 256 << 20}
    if hf is None or weights is None or e is None:
        yield from check_disk("run directory", run_dir, logs)
        return
    if config.trainer.update_weight_transfer_mode == "disk":
        logs["weights for the servers"] = 2 * weights.num_bytes
    yield from check_disk("run directory", run_dir, logs)
    if config.checkpoint.save is not None:
        # the new one is complete before the old one goes
        kept = (config.checkpoint.save_keep_last or 2) + 1
        parts = {f"{kept} checkpoints": kept * e.checkpoint}
        yield from check_disk("checkpoints", config.checkpoint.save, parts)
    host = {
        "processes": (node.num_ranks + 1) * PROCESS_BYTES,
        "KL references and teachers": e.reference * node.num_ranks,
        "offloaded optimizers": e.offloaded * node.num_ranks,
    }
    if not node.num_gpus:
        host["ranks"], host["SGLang"] = (e.rank + logits) * node.num_ranks, 2 * weights.num_bytes
    yield check_host_memory(psutil.virtual_memory().available, host)
    text = (
        f"{amount(e.rank)} a rank for weights, gradients and optimizer, {amount(logits)} for the"
        f" logits of {config.trainer.max_tokens_per_gpu:,} tokens; other activations on top"
    )
    yield fact("memory estimate", text)
    if config.replay.use_rollout_routing_replay and hf.is_moe:
        yield route_estimate(config, hf)


def check_host_memory(available: float, parts: dict[str, float]) -> Finding:
    """Memory of the host for this node's ranks, and on a CPU machine for the server too."""
    remedy = "fewer ranks, a smaller model, a machine with more, or other programs closed"
    return room("memory", "the host", available, parts, remedy, margin=_HOST_MARGIN)


def check_gpus(
    config: RunConfig, node: Node, rank_bytes: float | None, logits: float = 0.0
) -> Findings:
    """The servers' GPUs, best those that no rank has, and memory of a GPU for all that is on it.

    rank_bytes: None where the checkpoint does not tell.  logits: as of ``logits_bytes``.  No finding on
    a machine without GPUs.
    """
    if not node.num_gpus:
        return
    taken: list[int] = []
    try:
        servers = server_gpus(config, num_ranks=node.num_ranks, num_visible=node.num_gpus)
        taken = [gpu for gpus in servers for gpu in gpus]
    except ValueError as error:
        remedy = (
            "docs/slurm.md says who takes which GPU; if fewer than "
            f"{node.num_ranks} ranks are on this node, --nproc-per-node says so"
        )
        yield problem("servers", str(error), remedy)
    shared = [gpu for gpu in taken if gpu < node.num_ranks]
    if shared:
        text = f"SGLang and a rank share GPU {', '.join(map(str, shared))}: its memory and its time"
        remedy = "--sglang-mem-fraction-static leaves the rank its part; or fewer ranks than GPUs"
        yield warning("servers", text, remedy)
    elif taken:
        yield ok("servers", f"SGLang takes GPU {', '.join(map(str, taken))}, no rank does")
    if rank_bytes is None:
        return
    parts = {"a rank (activations come on top)": rank_bytes}
    if logits:
        parts["logits"] = logits
    remedy = (
        "more ranks (expert or pipeline parallel), --use-distributed-optimizer, --bf16,"
        " --optimizer-override (docs/models.md)"
    )
    if shared:
        parts["SGLang"] = _server_fraction(config) * node.gpu_bytes
        remedy += ", a lower --sglang-mem-fraction-static, or a GPU of its own for SGLang"
    margin = _GPU_MARGIN * node.gpu_bytes
    yield room("GPU memory", "a GPU", node.gpu_bytes, parts, remedy, margin=margin)


def _server_fraction(config: RunConfig) -> float:
    """The part of its GPU that SGLang takes."""
    given = [v for k, v in config.rollout.sglang.items() if "mem_fraction_static".startswith(k)]
    try:
        return float(given[0]) if given else _DEFAULT_FRACTION
    except (TypeError, ValueError):
        return _DEFAULT_FRACTION  # SGLang refuses such a flag itself

"""GPU, host and disk bytes that a configuration will take, and whether they are there.

Servers are placed by the training command's own rule (``launch.gpus``): the two cannot disagree.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf, prod
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from r3train.config import RunConfig
from r3train.config.hf_facts import HfModelFacts
from r3train.data.rotated_files import PART_BYTES
from r3train.doctor.finding import Finding, Findings, amount, fact, ok, problem, room, warning
from r3train.doctor.machine import Node, check_disk, existing_parent
from r3train.doctor.model_checks import Weights, checkpoint_bytes, count_weights, read_stages
from r3train.families import FAMILIES
from r3train.launch.gpus import server_gpus
from r3train.routing.layers import layers_by_stage, recomputed_moe_layers
from r3train.types import is_checked

if TYPE_CHECKING:
    from r3train.hf_checkpoint import TensorKind

# of a rank or a server before it holds anything: torch, Megatron, SGLang
PROCESS_BYTES = 1 << 29
# most tokens of a prefill by a GPU's size, and what SGLang leaves for graphs and parallel ranks
_PREFILL_TOKENS = ((20 << 30, 2048), (60 << 30, 4096), (160 << 30, 8192), (inf, 16384))
_TOKEN_BYTES = 3 << 19
_GRAPHS_BYTES = 3 << 30
# of a record and of its two log lines, as they are and compressed: of Qwen3-30B-A3B at 16 microbatches
_RECORD_BYTES, _RECORD_COMPRESSED = 750, 75
_LINES_BYTES, _LINES_COMPRESSED = 300, 12
# CUDA's context, NCCL's buffers, the allocator's fragments
_GPU_MARGIN = 0.1
_HOST_MARGIN = 2 << 30
# of the rows that a layer's experts get, at its peak next to what is kept: counted at real size
_ROUTED_COPIES = 3.5
# of a layer's input: gradients on their way through the layers, and messages of the stages on both sides
_ON_THE_WAY = 3


@dataclass(frozen=True)
class Estimate:
    """Bytes; activations are not in it."""

    weights: float  # of one rank, where it computes; so are the next two
    gradients: float
    optimizer: float
    reference: float  # of a rank on the host: KL reference, teacher, and the actor meanwhile
    offloaded: float  # of a rank on the host: the optimizer's state there (optimizer_cpu_offload)
    checkpoint: float  # one training checkpoint

    @property
    def rank(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageRanks:
    """Bytes of each rank of one pipeline stage; the ranks of a stage hold alike."""

    ranks: range
    layers: tuple[int, ...]  # 1-based
    held: Estimate
    activations: float  # of the microbatches in flight, all the time
    layer: float  # one layer's backward pass, with its forward pass where it is recomputed
    logits: float  # and the loss, whose backward pass is over before that of a layer begins
    update: float  # buckets of a weight update, when those of passes are gone

    @property
    def passes(self) -> float:
        return self.activations + max(self.layer, self.logits)

    @property
    def total(self) -> float:
        return self.held.rank + max(self.passes, self.update)


def estimate(
    config: RunConfig, weights: Weights, world_size: int, *, of_stage: bool = False
) -> Estimate:
    """Mixed precision keeps float32 masters, gradients and two moments next to bfloat16 weights.

    weights: of the model, which all stages share alike; with ``of_stage`` those of one pipeline stage.
    With LoRA the adapters have them and the weights have none.  Of an adapter about a half is on every
    tensor rank; all of it is counted.  ``optimizer_overrides`` take less, or the host's.
    """
    parallel, bf16 = config.parallel, config.model.bf16
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    etp, stages = parallel.expert_tensor_parallel_size, 1 if of_stage else pp
    dense = ((weights.dense - weights.whole) / tp + weights.whole) / stages
    expert = weights.expert / (parallel.expert_model_parallel_size * etp * stages)
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
        dense = weights.adapter_dense / stages
        expert = weights.adapter_expert / (parallel.expert_model_parallel_size * stages)
    return Estimate(
        weights=frozen + (dense + expert) * weight_bytes,
        gradients=(dense + expert) * gradient,
        optimizer=held_state * (dense / ways + expert / expert_ways),
        reference=reference,
        offloaded=offloaded_state * (dense / ways + expert / expert_ways),
        checkpoint=trained * (weight_bytes + state),
    )


# of a parameter whose optimizer is on the host (Adam and --bf16 only): weight, moments and gradient in float32
OFFLOADED_BYTES = 16


def _optimizer_bytes(config: RunConfig, state: int) -> tuple[float, float, float]:
    """Bytes per parameter: its gradient, its state where the rank computes, and its state on the host.

    state: those of Megatron's own choice, float32 throughout.
    """
    given = config.trainer.optimizer_overrides
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
    gradient = sizes[str(given.get("main_grads_dtype", "fp32"))]
    if given.get("optimizer_cpu_offload"):  # all of it is on the host, in float32, with a gradient
        return gradient, 0.0, OFFLOADED_BYTES
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
    copies = 5 if config.algorithm.entropy_coef else 4
    return width * (rows * (2 if config.model.bf16 else 4) + copies * at_once * 4)


def stages(config: RunConfig, hf: HfModelFacts, world_size: int) -> list[StageRanks]:
    """Bytes of the ranks of every pipeline stage.  Source of their order: Megatron-Core's tp-cp-ep-dp-pp.

    Raises ValueError for ranks or layers that do not divide over the stages.
    """
    pp, value = config.parallel.pipeline_model_parallel_size, 2 if config.model.bf16 else 4
    if world_size % pp:
        raise ValueError(
            f"world size {world_size} does not divide by pipeline_model_parallel_size {pp}"
        )
    each, by_stage = world_size // pp, read_stages(config, hf)
    # distributed: two buckets, and the tensors of a third
    held = {"distributed": 3.0, "disk": 0.0, "shared_memory": 1.0}
    update = held[config.trainer.update_weight_transfer_mode] if config.has_engines else 0.0
    if update:
        whole = sum(kind.num_elements for kinds in by_stage for kind in kinds.values()) * value
        update = min(update * config.trainer.update_weight_buffer_size, whole)
    found = []
    for number, (chunks, kinds) in enumerate(zip(layers_by_stage(config.parallel, hf), by_stage)):
        has_head = number == pp - 1
        kept, layer = activation_bytes(config, hf, number, chunks, kinds, has_head=has_head)
        found.append(
            StageRanks(
                ranks=range(number * each, (number + 1) * each),
                layers=tuple(layer for chunk in chunks for layer in chunk),
                held=estimate(config, count_weights(kinds, config.lora), world_size, of_stage=True),
                activations=kept,
                layer=layer,
                logits=logits_bytes(config, hf.vocab_size) if has_head else 0.0,
                update=update,
            )
        )
    return found


def activation_bytes(
    config: RunConfig,
    hf: HfModelFacts,
    stage: int,
    chunks: Sequence[tuple[int, ...]],
    kinds: Mapping[str, TensorKind],
    *,
    has_head: bool,
) -> tuple[float, float]:
    """Bytes that autograd keeps of the microbatches in flight on a rank of this stage, and those of one layer.

    A layer that is recomputed keeps its input only; its matrices' are there one such layer at a time, with what
    its backward pass makes.  Attention keeps no scores.  The head's input is gathered from the tensor ranks.
    """
    parallel, model = config.parallel, config.model
    value = 2 if model.bf16 else 4
    tokens = config.trainer.max_tokens_per_gpu
    layer_input = tokens / parallel.tensor_model_parallel_size * hf.hidden_size * value
    sizes = {layer: layer_bytes(config, hf, layer, kinds) for chunk in chunks for layer in chunk}
    whole = {layer: of_it for layer, (of_it, _) in sizes.items()}
    made = max((in_passing for _, in_passing in sizes.values()), default=0.0)
    kept, at_once = 0.0, 0.0
    for chunk in chunks:
        if has_head and chunk is chunks[-1]:  # earlier stages free their output after sending
            kept += layer_input
        if model.recompute_granularity == "full":
            count = model.recompute_num_layers or 1
            if model.recompute_method == "uniform":
                kept += ceil(len(chunk) / count) * layer_input
                at_once = max(at_once, count * max((whole[n] for n in chunk), default=0.0))
                continue
            again, others = chunk[:count], [whole[n] for n in chunk[count:]]
            kept += len(again) * layer_input + sum(others)
            # after the others, of which nothing is left then
            at_once = max(at_once, max((whole[n] for n in again), default=0.0) - sum(others))
        else:  # modules that are recomputed (selective) are counted as if they were kept
            kept += sum(whole[n] for n in chunk)
    kept = kept * _in_flight(config, stage) + _ON_THE_WAY * layer_input
    if has_head and parallel.tensor_model_parallel_size > 1:
        kept += tokens * hf.hidden_size * value
    return kept + _positions(config, list(whole), kinds), at_once + made


def _positions(config: RunConfig, layers: Sequence[int], kinds: Mapping[str, TensorKind]) -> float:
    """Bytes of MLA's rotary positions: each layer (1-based) makes its own, and 32 of them stay.

    Source: Megatron-Core 0.16.1, ``RotaryEmbedding.get_emb``.
    """
    total = 0.0
    for layer in layers[:32]:
        of = f"model.layers.{layer - 1}.self_attn.kv_a_"
        if rows := kinds.get(f"{of}proj_with_mqa.weight"):
            width = rows.shape[0] - kinds[f"{of}layernorm.weight"].shape[0]
            total += config.trainer.max_tokens_per_gpu * width * 4
    return total


def layer_bytes(
    config: RunConfig, hf: HfModelFacts, layer: int, kinds: Mapping[str, TensorKind]
) -> tuple[float, float]:
    """Return one layer's bytes (1-based): saved for its backward pass, and temporary.

    Temporary: gradients of gate and up, or copies of rows on their way to their experts and back.
    """
    of = f".layers.{layer - 1}."
    own = {name.partition(of)[2]: kind for name, kind in kinds.items() if of in name}
    value = 2 if config.model.bf16 else 4
    rows = config.trainer.max_tokens_per_gpu / config.parallel.tensor_model_parallel_size
    values = sum(_values(hf, name, kind) for name, kind in own.items())
    kept = rows * (values + _attended(own)) * value
    if layer not in hf.moe_layer_numbers:
        gate_up = (own.get(f"mlp.{name}_proj.weight") for name in ("gate", "up"))
        return kept, rows * sum(kind.shape[0] for kind in gate_up if kind) * value
    kept += rows * hf.num_experts * 3 * 4  # router logits, scores and probabilities in float32
    routed = rows * hf.num_experts_per_tok * value
    kept += routed * hf.hidden_size
    family = FAMILIES.get(hf.model_type)
    if family is not None and family.activation_steps:
        kept += routed * family.activation_steps * own["mlp.experts.down_proj"].shape[1]
    on_their_way = routed * _ROUTED_COPIES * hf.hidden_size
    return kept, max(on_their_way, _of_experts(config, hf, routed, own))


def _of_experts(
    config: RunConfig, hf: HfModelFacts, routed: float, own: Mapping[str, TensorKind]
) -> float:
    """Bytes that the backward pass of experts makes, whose own width may be several times that of the model.

    routed: those of one number in each row.  own: the layer's tensors.  Of down: the gradients of its output, its
    input and all its weights here; then that of gate and up, when down's input is gone.
    """
    ends = ("down_proj", "down_proj.weight", "w2.weight")
    down = (kind for name, kind in own.items() if ".experts." in name and name.endswith(ends))
    numbers = sum(prod(kind.shape) for kind in down)
    parallel, value = config.parallel, 2 if config.model.bf16 else 4
    width = numbers / hf.num_experts / hf.hidden_size
    weights = numbers * value / parallel.expert_model_parallel_size
    return max(routed * (width + hf.hidden_size) + weights, routed * 2 * width)


def _values(hf: HfModelFacts, name: str, kind: TensorKind) -> float:
    """Numbers that a matrix takes and gives for one token; of experts those that are as wide as an expert only.

    The experts' input counts once per token; the combine saves nothing; vectors count 0.
    """
    if len(kind.shape) < 2 or name.endswith("bias"):
        return 0.0
    if ".experts." not in name:
        return sum(kind.shape[:2])
    *experts, rows, columns = kind.shape
    held = experts[0] if experts else 1
    return hf.num_experts_per_tok * held / hf.num_experts * (rows + columns - hf.hidden_size)


def _attended(own: Mapping[str, TensorKind]) -> int:
    """Numbers of queries and keys that attention keeps next to its matrices' outputs, by a layer's tensors.

    A norm of each head keeps as many; one over all heads keeps float32 too.  Of its 5
    numbers one is fitted: with 4 a rank of MiniMax-M2 took more than its estimate.
    """
    if "self_attn.k_proj.weight" not in own:  # of MLA's low ranks
        return 0
    queries, keys = (own[f"self_attn.{name}_proj.weight"].shape[0] for name in "qk")
    norm = own.get("self_attn.q_norm.weight")
    if norm is None:
        return queries + keys
    return (queries + keys) * (5 if norm.shape[0] == queries else 2)


def _in_flight(config: RunConfig, stage: int) -> float:
    """Microbatches whose activations a stage holds at once; of a virtual pipeline the share of its chunks.

    Source: Megatron-Core 0.16.1, ``schedules.get_pp_rank_microbatches``.
    """
    pp = config.parallel.pipeline_model_parallel_size
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    if vpp is None:
        return pp - stage
    return ((pp - stage - 1) * 2 + (vpp - 1) * pp + 1) / vpp


def longest_prompt(config: RunConfig, hf: HfModelFacts) -> int:
    """Return the most tokens that a prompt may have."""
    context = config.rollout.rollout_max_context_len or hf.max_position_embeddings
    return config.rollout.rollout_max_prompt_len or context


def route_estimate(config: RunConfig, hf: HfModelFacts) -> Finding:
    """Bytes of the routes of a token, of the longest sample, and of a rollout of such samples."""
    shape, tokens = hf.route_shape, longest_sample(config, hf)
    slots = hf.num_hidden_layers * hf.num_experts_per_tok
    row = slots * shape.dtype.itemsize
    sample, on_wire = (tokens - 1) * row, (tokens - 1) * slots * 4 * 4 // 3  # int32 in base64
    return fact(
        "route estimate",
        f"{row} B per token; a sample of {tokens} tokens {amount(sample)} ({amount(on_wire)} on the "
        f"wire); at most {amount(sample * config.samples_per_rollout)} a rollout on rank 0",
    )


def check_evidence_room(
    config: RunConfig, hf: HfModelFacts, world_size: int, free: float
) -> Finding:
    """Bytes of the whole run's R3 evidence and its log lines, next to the ``free`` ones.

    Of every call their number depends on how samples fill microbatches; it is that of full-length samples.
    """
    parallel, interval = config.parallel, config.replay.r3_check_interval
    steps = sum(is_checked(n, interval) for n in range(config.rollout.num_rollout))
    recomputed = recomputed_moe_layers(parallel, config.model, hf)
    places = len(hf.moe_layer_numbers) * len(config.replay_passes) + len(recomputed)
    sums = places * (world_size // parallel.pipeline_model_parallel_size) * steps
    samples = ceil(config.samples_per_step / max(1, world_size // parallel.dense_ranks))
    tokens = config.trainer.max_tokens_per_gpu * parallel.context_parallel_size
    microbatches = ceil(samples / max(1, tokens // longest_sample(config, hf)))
    calls = sums * config.steps_per_rollout * microbatches
    latest = world_size * PART_BYTES
    summed = sums * (_RECORD_COMPRESSED + _LINES_COMPRESSED)
    summed += min(latest, sums * _RECORD_BYTES) + min(latest, sums * _LINES_BYTES)
    whole = calls * (_RECORD_COMPRESSED + _LINES_BYTES) + min(latest, calls * _RECORD_BYTES)
    of = f"of {steps:,} steps on {world_size} ranks"
    if config.sums_evidence:
        needed, text = summed, f"about {amount(summed)} {of}, summed"
    else:
        needed, text = whole, (
            f"at most {amount(whole)} {of}, a record and two log lines a router call; "
            f"{amount(summed)} with --r3-evidence summed"
        )
    if needed > free:
        remedy = "free room there" if config.sums_evidence else "--r3-evidence summed"
        return warning("evidence estimate", f"{text}; {amount(free)} are free", remedy)
    return fact("evidence estimate", text)


def longest_sample(config: RunConfig, hf: HfModelFacts, prompt: int | None = None) -> int:
    """Tokens of the longest sample that a rollout can have.

    prompt: tokens of the longest prompt, None where it is not known.
    """
    context = config.rollout.rollout_max_context_len or hf.max_position_embeddings
    if prompt is None:
        prompt = longest_prompt(config, hf)
    return min(context, config.rollout.longest_sample(prompt))


def check_room(
    config: RunConfig, hf: HfModelFacts | None, weights: Weights | None, node: Node
) -> Findings:
    """GPUs, disk and host memory for the run; without a readable checkpoint less of it."""
    fullest = None
    if hf is not None and weights is not None:
        with suppress(ValueError):  # layers that do not divide: check_job has said so
            fullest = max(stages(config, hf, node.world_size), key=lambda stage: stage.total)
    yield from check_gpus(config, node, fullest)
    run_dir = config.run.run_dir or Path("runs")
    logs = {"logs and evidence": 256 << 20}
    if fullest is not None and config.trainer.update_weight_transfer_mode == "disk":
        logs["weights for the servers"] = 2 * checkpoint_bytes(hf)
    yield from check_disk("run directory", run_dir, logs)
    if fullest is None:
        return
    e = estimate(config, weights, node.world_size)
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
        host["ranks"], host["SGLang"] = fullest.total * node.num_ranks, 2 * checkpoint_bytes(hf)
    if config.trainer.update_weight_transfer_mode == "shared_memory":
        host["weights for the servers"] = checkpoint_bytes(hf)
    available = psutil.virtual_memory().available
    remedy = "fewer ranks, a smaller model, a machine with more memory, or end other programs"
    yield room("memory", "the host", available, host, remedy, margin=_HOST_MARGIN)
    text = (
        f"{amount(fullest.held.rank)} a rank for weights, gradients and optimizer,"
        f" {amount(fullest.passes)} for activations and logits of"
        f" {config.trainer.max_tokens_per_gpu:,} tokens; --dry-run --estimate lists every rank"
    )
    yield fact("memory estimate", text)
    if config.replay.use_rollout_routing_replay and hf.is_moe:
        yield route_estimate(config, hf)
    if config.r3_check_enabled and hf.is_moe:
        free = shutil.disk_usage(existing_parent(run_dir)).free
        yield check_evidence_room(config, hf, node.world_size, free)


def check_gpus(config: RunConfig, node: Node, rank: StageRanks | None) -> Findings:
    """The servers' GPUs, best those that no rank has, and memory of a GPU for all that is on it.

    rank: the fullest; None where the checkpoint does not tell.  No finding on a machine without GPUs.
    """
    if not node.num_gpus:
        return
    taken: list[int] = []
    try:
        servers = server_gpus(config, num_ranks=node.num_ranks, num_visible=node.num_gpus)
        taken = [gpu for gpus in servers for gpu in gpus]
    except ValueError as error:
        remedy = (
            "docs/slurm.md says who takes which GPU; if this node has fewer than "
            f"{node.num_ranks} ranks, give their number with --nproc-per-node"
        )
        yield problem("servers", str(error), remedy)
    shared = [] if config.rollout.colocate else [gpu for gpu in taken if gpu < node.num_ranks]
    gpus = f"GPU {', '.join(map(str, shared or taken))}"
    if shared:
        text = f"SGLang and a rank share {gpus}, its memory and its time"
        remedy = (
            "leave the rank its part (--sglang-mem-fraction-static), or start fewer ranks than GPUs"
        )
        yield warning("servers", text, remedy)
    elif taken:  # colocated, one of the two at a time
        whose = "in turns with the ranks" if config.rollout.colocate else "no rank does"
        yield ok("servers", f"SGLang takes {gpus}, {whose}")
    if rank is None:
        return
    held = rank.held.rank
    parts = {"a rank": held, "activations and logits": rank.total - held}
    remedy = (
        "more ranks (expert or pipeline parallel), --use-distributed-optimizer, --bf16,"
        " --optimizer-override (docs/models.md)"
    )
    if shared:
        parts["SGLang"] = server_fraction(config, node.gpu_bytes) * node.gpu_bytes
        remedy += ", a lower --sglang-mem-fraction-static, or a GPU of its own for SGLang"
    margin = _GPU_MARGIN * node.gpu_bytes
    yield room("GPU memory", "a GPU", node.gpu_bytes, parts, remedy, margin=margin)


def server_fraction(config: RunConfig, gpu_bytes: float) -> float:
    """The part of a GPU of this size that SGLang gives to weights and pool.

    Source: SGLang 0.5.23, ``handle_gpu_memory_settings``: it leaves out 1.5 MiB for each token of a prefill, of
    which a larger GPU has more, and what graphs and parallel ranks need: 1.2 to 4.6 GiB in our recipes.
    """
    tokens = next(tokens for below, tokens in _PREFILL_TOKENS if gpu_bytes < below)
    default = max(0.0, 1 - (tokens * _TOKEN_BYTES + _GRAPHS_BYTES) / gpu_bytes)
    given = [v for k, v in config.rollout.sglang.items() if "mem_fraction_static".startswith(k)]
    try:
        return float(given[0]) if given else default
    except (TypeError, ValueError):
        return default  # SGLang refuses such a flag itself

"""Bytes that a run takes, from its settings and the model's config.json alone: ranks, servers, host, disk.

Parameters, their shapes and who splits them are those of the family's weight table, so what a rank holds between
microbatches is exact.  What a microbatch takes is one formula for each kind of layer.  A rank's total holds within
15%: nothing was measured on a GPU, tests/rehearsal counts it on Megatron's own modules and schedule at real size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, reduce
from math import ceil, inf, prod

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.config.pipeline_layout import layers_by_stage
from r3train.config.lora_settings import LoraSection
from r3train.data.rotated_files import PART_BYTES
from r3train.families import FAMILIES, quantised_tensors, weights_of
from r3train.families.weights import ModelWeights, Weight
from r3train.launch.gpus import server_size
from r3train.routing.layers import recomputed_moe_layers
from r3train.types import is_checked

GIGA = 10**9
# of a server's GPU before it loads anything: CUDA's context, NCCL's buffers
SERVER_BYTES = 2 << 30
_MOST_TP = 64
# most tokens of a prefill by a GPU's size, and what SGLang leaves for graphs and parallel ranks
_PREFILL_TOKENS = ((20 << 30, 2048), (60 << 30, 4096), (160 << 30, 8192), (inf, 16384))
_TOKEN_BYTES = 3 << 19
_GRAPHS_BYTES = 3 << 30
# tokens in SGLang's pool of a sliding window's layers for one in that of the others (--sglang-swa-full-tokens-ratio)
_WINDOW_SHARE = 0.8
# of a record and of its two log lines, as they are and compressed: of Qwen3-30B-A3B at 16 microbatches
_RECORD_BYTES, _RECORD_COMPRESSED = 750, 75
_LINES_BYTES, _LINES_COMPRESSED = 300, 12
# of the rows that a layer's experts get, at its peak next to what is kept
_ROUTED_COPIES = 3.5
# of a rank or a server before it holds anything: torch, Megatron, SGLang
PROCESS_BYTES = 1 << 29
# of a parameter whose optimizer is on the host (Adam and --bf16 only): weight, moments and gradient in float32
OFFLOADED_BYTES = 16


def amount(num_bytes: float) -> str:
    """Bytes for a reader: "512 B", "3.4 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def gpus_in_words(count: int) -> str:
    """Return the number as people write it: 1 GPU, 2 GPUs."""
    return f"{count} GPU{'s' * (count != 1)}"


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: those that tensor ranks split, those that each has whole, and experts'.

    ``adapter_dense``, ``adapter_expert``: of the adapters that LoRA puts on them.
    """

    split: int = 0
    whole: int = 0
    expert: int = 0
    adapter_dense: int = 0
    adapter_expert: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*map(sum, zip(astuple(self), astuple(other))))

    @property
    def total(self) -> int:
        """The model's own."""
        return self.split + self.whole + self.expert

    @property
    def adapters(self) -> int:
        return self.adapter_dense + self.adapter_expert


@dataclass(frozen=True)
class Layer:
    """A layer's parameters, and numbers of one token: kept for the backward pass, and in a server's cache."""

    parameters: Parameters
    mixer: float  # kept by attention, a delta net or a Mamba mixer
    mlp: float  # kept by a dense MLP, and by experts that every token passes
    keys: int  # of the key-value cache, which servers split
    latent: int  # of latent attention's cache, of which each GPU has all


class Model:
    """A checkpoint's facts and its weight table, each layer counted once."""

    def __init__(self, hf: HfModelFacts, lora: LoraSection = LoraSection()):
        self.hf, self.lora, self.table = hf, lora, weights_of(hf)
        layers = range(hf.num_hidden_layers)
        self.layers = [self._layer(self.table, layer_id) for layer_id in layers]

    @cached_property
    def total(self) -> Parameters:
        """The whole model's; a tied output layer counts once."""
        return self.stage_parameters(range(1, len(self.layers) + 1), is_first=True, is_last=True)

    @cached_property
    def quantised(self) -> int:
        """Numbers that servers of fp8 hold in a byte each."""
        shapes = self.table.shapes()
        return sum(prod(shapes[name]) for name in quantised_tensors(self.hf))

    def stage_parameters(
        self, layers: Iterable[int], *, is_first: bool, is_last: bool
    ) -> Parameters:
        """Count a pipeline stage's: of its layers (1-based), of the embedding, of the norm and output layer."""
        found = reduce(Parameters.__add__, (self.layers[n - 1].parameters for n in layers), _NONE)
        embedding, norm, output = self.table.table.model_weights
        if is_first:
            found += self._parameters([embedding], "")
        if is_last:
            found += self._parameters([norm], "")
        if is_last and not (is_first and self.table.tied):  # a tied stage of its own has a copy
            found += self._parameters([output], "")
        return found

    def _parameters(self, weights: Iterable[Weight], prefix: str) -> Parameters:
        found = dict.fromkeys(Parameters.__dataclass_fields__, 0)
        for weight in weights:
            kind = "expert" if weight.is_expert else "split" if weight.sharded else "whole"
            adapter = "adapter_expert" if weight.is_expert else "adapter_dense"
            for tensor, shape in zip(weight.disk, self.table.shapes_of(weight)):
                each = self.table.sizes["experts"] if "{e}" in tensor.name else 1
                found[kind] += each * prod(shape)
                if self.lora.enabled and weight.lora and self.lora.targets([prefix + tensor.name]):
                    *experts, rows, columns = shape
                    found[adapter] += self.lora.lora_rank * each * prod(experts) * (rows + columns)
        return Parameters(**found)

    def _layer(self, table: ModelWeights, layer_id: int) -> Layer:
        weights = table.layer_weights(layer_id)
        rows: dict[str, int] = {}  # of the tensors, by their names behind the layer's
        kept = {"mixer": 0.0, "mlp": 0.0}
        for weight in weights:
            part = "mlp" if weight.name.startswith("mlp.") else "mixer"
            for tensor, shape in zip(weight.disk, table.shapes_of(weight)):
                rows[tensor.name.partition(".")[2]] = shape[0]
                if weight.columns and not weight.is_expert:  # a matrix keeps its input and output
                    kept[part] += sum(shape)
        latent = rows.get("kv_a_proj_with_mqa.weight", 0)
        query, keys = (rows.get(f"{name}_proj.weight", 0) for name in "qk")
        if not latent:
            # queries and keys as normed and as turned; of a delta net or a Mamba mixer what convolution and scan make
            kept["mixer"] += 2 * (query + keys)
            kept["mixer"] += 1.5 * sum(n for name, n in rows.items() if "in_proj" in name)
        parameters = self._parameters(weights, table.layer_prefix(layer_id))
        return Layer(parameters, **kept, keys=keys + rows.get("v_proj.weight", 0), latent=latent)


_NONE = Parameters()


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds between microbatches."""

    weights: float  # where it computes; so are the next two
    gradients: float
    optimizer: float
    reference: float  # on the host: KL reference, teacher, and the actor meanwhile
    offloaded: float  # on the host: the optimizer's state there (optimizer_cpu_offload)

    @property
    def rank(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageRanks:
    """Bytes of each rank of one pipeline stage; the ranks of a stage hold alike."""

    ranks: range
    held: Held
    passes: float  # at the peak of forward and backward passes
    update: float  # buckets of a weight update, when those of passes are gone

    @property
    def total(self) -> float:
        return self.held.rank + max(self.passes, self.update)


def stages(config: RunConfig, model: Model, world_size: int) -> list[StageRanks]:
    """Bytes of the ranks of every pipeline stage.  Source of their order: Megatron-Core's tp-cp-ep-dp-pp.

    Raises ValueError for ranks or layers that do not divide over the stages.
    """
    pp = config.parallel.pipeline_model_parallel_size
    if world_size % pp:
        raise ValueError(
            f"world size {world_size} does not divide by pipeline_model_parallel_size {pp}"
        )
    # distributed: two buckets, and the tensors of a third
    buckets = {"distributed": 3.0, "disk": 0.0, "shared_memory": 1.0}
    update = buckets[config.trainer.update_weight_transfer_mode] if config.has_engines else 0.0
    update *= config.trainer.update_weight_buffer_size
    stage_layers, each = (
        layers_by_stage(config.parallel, model.hf.num_hidden_layers),
        world_size // pp,
    )
    held = sum(len(chunk) for chunks in stage_layers for chunk in chunks)
    if held != len(model.layers):
        raise ValueError(
            f"the pipeline stages hold {held} layers, {model.hf.path} has {len(model.layers)}"
        )
    found = []
    for number, chunks in enumerate(stage_layers):
        is_last = number == pp - 1
        layers = tuple(layer for chunk in chunks for layer in chunk)
        parameters = model.stage_parameters(layers, is_first=number == 0, is_last=is_last)
        found.append(
            StageRanks(
                ranks=range(number * each, (number + 1) * each),
                held=_held(config, parameters, world_size),
                passes=pass_bytes(config, model, number, chunks, has_head=is_last),
                update=min(update, server_bytes(config, model)),
            )
        )
    return found


def host_bytes(
    config: RunConfig,
    model: Model,
    fullest: StageRanks,
    world_size: int,
    num_ranks: int,
    on_gpus: bool,
) -> dict[str, float]:
    """Bytes of a node's memory by what holds them, where ``num_ranks`` of all ranks and their servers run.

    on_gpus: GPUs are here; a recipe for NCCL is judged as on them.
    """
    weights = server_bytes(config, model)
    own_servers = config.has_engines and not config.rollout.has_external_servers
    host = {
        "processes": (num_ranks + own_servers) * PROCESS_BYTES,
        "KL references and teachers": fullest.held.reference * num_ranks,
        "offloaded optimizers": fullest.held.offloaded * num_ranks,
    }
    on_gpus |= config.parallel.distributed_backend == "nccl"
    if on_gpus and config.rollout.colocate:
        away = fullest.held.weights + fullest.held.optimizer
        host["what ranks hold, while servers generate"] = away * num_ranks
    if not on_gpus:
        host |= {"ranks": fullest.total * num_ranks, "SGLang": 2 * weights * own_servers}
    if own_servers and config.trainer.update_weight_transfer_mode == "shared_memory":
        host["weights for the servers"] = weights
    if config.checkpoint.async_save:  # each rank writes its part out of memory
        checkpoint = training_checkpoint_bytes(config, model)
        host["a checkpoint that is being written"] = checkpoint * num_ranks / world_size
    return host


def value_bytes(config: RunConfig) -> int:
    """Bytes of a weight, and of an activation."""
    return 2 if config.model.bf16 else 4


def server_bytes(config: RunConfig, model: Model) -> int:
    """Bytes of all weights as a server holds them; the scales of fp8 are a 4096th of its numbers."""
    saved = model.quantised if config.serves_fp8 else 0
    return model.total.total * value_bytes(config) - saved


def _held(config: RunConfig, parameters: Parameters, world_size: int) -> Held:
    """Mixed precision keeps float32 masters, gradients and two moments next to bfloat16 weights.

    With LoRA the adapters have them and the weights have none.  Of an adapter about a half is on every
    tensor rank; all of it is counted.  ``optimizer_overrides`` take less, or the host's.
    """
    parallel, value = config.parallel, value_bytes(config)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    dense = parameters.split / tp + parameters.whole
    expert = parameters.expert / (ep * etp)
    weights = (dense + expert) * value
    gradient, state, on_host = optimizer_bytes(config)
    ways = expert_ways = 1
    if parallel.use_distributed_optimizer:
        ways = max(1, world_size // (tp * pp))  # context parallelism shards it too
        expert_ways = max(1, world_size // parallel.expert_ranks)
    references = config.algorithm.needs_reference and not config.reference_is_base
    copies = references + config.algorithm.holds_teacher
    reference = (copies + 1.0 if copies else 0.0) * weights
    if config.lora.enabled:
        dense, expert = parameters.adapter_dense, parameters.adapter_expert / ep
        weights += (dense + expert) * value
    sharded = dense / ways + expert / expert_ways
    gradients = (dense + expert) * gradient
    return Held(weights, gradients, state * sharded, reference, on_host * sharded)


def _master_and_moments(config: RunConfig) -> int:
    """Bytes per parameter of Megatron's own choice, float32 throughout."""
    return (8 if config.trainer.optimizer == "adam" else 0) + (4 if config.model.bf16 else 0)


def optimizer_bytes(config: RunConfig) -> tuple[float, float, float]:
    """Bytes per parameter: its gradient, its state where the rank computes, and its state on the host."""
    given, state = config.trainer.optimizer_overrides, _master_and_moments(config)
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


def training_checkpoint_bytes(config: RunConfig, model: Model) -> float:
    """Bytes of one training checkpoint."""
    trained = model.total.adapters if config.lora.enabled else model.total.total
    return trained * (value_bytes(config) + _master_and_moments(config))


def logits_bytes(config: RunConfig, vocab_size: int) -> float:
    """Bytes of the longest microbatch's logits on one rank, with the float32 chunks of the loss.

    Rows without loss have no logits, but a microbatch may hold hardly any: all of its rows count.
    """
    rows, chunk = config.trainer.max_tokens_per_gpu, config.trainer.log_probs_chunk_size
    width = vocab_size / config.parallel.tensor_model_parallel_size
    at_once = min(rows, chunk) if chunk > 0 else rows
    copies = 5 if config.algorithm.entropy_coef else 4
    return width * (rows * value_bytes(config) + copies * at_once * 4)


def pass_bytes(
    config: RunConfig,
    model: Model,
    stage: int,
    chunks: Sequence[tuple[int, ...]],
    *,
    has_head: bool,
) -> float:
    """Bytes that forward and backward passes take on a rank of this stage, at their peak.

    Of the microbatches in flight each layer keeps what ``layer_bytes`` says, or its input where it is recomputed.
    Next to that is one layer (or those recomputed at once) in its backward pass, or before it the loss.  Modules
    that are recomputed (selective) count as kept.
    """
    settings, parallel = config.model, config.parallel
    rows = config.trainer.max_tokens_per_gpu / parallel.tensor_model_parallel_size
    layer_input = rows * model.hf.hidden_size * value_bytes(config)
    sizes = {n: layer_bytes(config, model, n) for chunk in chunks for n in chunk}
    at_once = max((passing for _, passing in sizes.values()), default=0.0)
    count, kept = settings.recompute_num_layers or 1, 0.0
    is_full = settings.recompute_granularity == "full"
    is_uniform = is_full and settings.recompute_method == "uniform"
    if is_full:
        at_once += max(size for size, _ in sizes.values()) * (count if is_uniform else 1)
    for chunk in chunks:
        if is_uniform:
            kept += ceil(len(chunk) / count) * layer_input
            continue
        again = chunk[:count] if is_full else ()
        kept += len(again) * layer_input + sum(sizes[n][0] for n in chunk[len(again) :])
    logits = logits_bytes(config, model.hf.vocab_size) if has_head else 0.0
    return kept * _in_flight(config, stage) + 3 * layer_input + max(at_once, logits)


def layer_bytes(config: RunConfig, model: Model, number: int) -> tuple[float, float]:
    """Return one layer's bytes (1-based): kept of a microbatch for its backward pass, and temporary in that pass.

    Attention keeps no scores.  Experts get equally many rows, and keep their input, gate, up and activation, with the
    steps between that no kernel fuses.  The router keeps logits, scores and probabilities in float32.
    """
    hf, parallel, value = model.hf, config.parallel, value_bytes(config)
    layer, sizes = model.layers[number - 1], model.table.sizes
    rows = config.trainer.max_tokens_per_gpu / parallel.tensor_model_parallel_size
    kept = rows * (layer.mixer + layer.mlp) * value
    if number not in hf.moe_layer_numbers:
        return kept, rows * 2 * sizes["mlp"] * value
    routed = rows * hf.num_experts_per_tok * value
    width = parallel.expert_tensor_parallel_size * hf.hidden_size  # ranks of an expert share rows
    steps = 3 + FAMILIES[hf.model_type].activation_steps
    kept += routed * (width + steps * sizes["expert"]) + rows * hf.num_experts * 3 * 4
    return kept, routed * _ROUTED_COPIES * width


def _in_flight(config: RunConfig, stage: int) -> float:
    """Microbatches whose activations a stage holds at once; of a virtual pipeline the share of its chunks.

    Source: Megatron-Core 0.19.2, ``schedules.get_pp_rank_microbatches``.
    """
    pp = config.parallel.pipeline_model_parallel_size
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    if vpp is None:
        return pp - stage
    return ((pp - stage - 1) * 2 + (vpp - 1) * pp + 1) / vpp


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


def estimate_server(
    config: RunConfig, model: Model, gpu_bytes: float, longest_prompt: int | None = None
) -> ServerEstimate:
    """One server of the run: those of several GPUs split weights and keys, and every GPU has all of MLA's."""
    rollout, value = config.rollout, value_bytes(config)
    weights = server_bytes(config, model)
    budget = server_fraction(config, gpu_bytes) * gpu_bytes - SERVER_BYTES
    gpus, is_given = server_size(rollout.sglang), True
    if gpus is None:  # the fewest that leave a third of their room to the pool
        gpus, is_given = 1, False
        while weights / gpus > budget * 2 / 3 and gpus < _MOST_TP:
            gpus *= 2
    split, shares = min(gpus, model.hf.num_key_value_heads), _pool_shares(config, model)
    token_bytes = value * sum(
        (layer.latent + layer.keys / split) * share for layer, share in zip(model.layers, shares)
    )
    pool = max(0, int((budget - weights / gpus) / token_bytes)) if token_bytes else 0
    if type(most := rollout.sglang.get("max_total_tokens")) is int:
        pool = min(pool, most)
    servers = len(rollout.rollout_external_engine_addrs) or rollout.rollout_num_engines
    tokens = rollout.most_in_flight * longest_sample(config, model.hf, longest_prompt)
    return ServerEstimate(
        gpus,
        is_given,
        weights / gpus,
        token_bytes,
        pool,
        in_flight=ceil(rollout.most_in_flight / servers),
        needed_tokens=ceil(tokens / servers),
    )


def _pool_shares(config: RunConfig, model: Model) -> list[float]:
    """Tokens that the pool holds in each layer for one token in the layers of full attention.

    Source: SGLang 0.5.23, ``HybridSWAPoolConfigurator``: layers of a sliding window have a smaller pool.
    """
    flags = config.rollout.sglang
    window_share = flags.get("swa_full_tokens_ratio") or _WINDOW_SHARE
    if flags.get("disable_hybrid_swa_memory") or type(window_share) is not float:
        window_share = 1.0
    types = model.hf.content.get("layer_types") or []
    slides = ["sliding" in kind for kind in types[: len(model.layers)]]
    slides += [False] * (len(model.layers) - len(slides))
    return [window_share if one and not all(slides) else 1.0 for one in slides]


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


def longest_sample(config: RunConfig, hf: HfModelFacts, prompt: int | None = None) -> int:
    """Tokens of the longest sample that a rollout can have.

    prompt: tokens of the longest prompt, None where it is not known.
    """
    context = config.rollout.rollout_max_context_len or hf.max_position_embeddings
    if prompt is None:
        prompt = config.rollout.rollout_max_prompt_len or context
    if config.agent.named is not None:  # it sends what it likes
        return context
    return min(context, config.rollout.longest_sample(prompt))


def route_text(config: RunConfig, hf: HfModelFacts) -> str:
    """Bytes of the routes of a token, of the longest sample, and of a rollout of such samples."""
    tokens, slots = longest_sample(config, hf), hf.num_hidden_layers * hf.num_experts_per_tok
    row = slots * hf.route_shape.dtype.itemsize
    sample, on_wire = (tokens - 1) * row, (tokens - 1) * slots * 4 * 4 // 3  # int32 in base64
    return (
        f"{row} B per token; a sample of {tokens} tokens {amount(sample)} ({amount(on_wire)} on the "
        f"wire); at most {amount(sample * config.samples_per_rollout)} per rollout on rank 0"
    )


def evidence_bytes(config: RunConfig, hf: HfModelFacts, world_size: int) -> tuple[float, float]:
    """Bytes of the whole run's R3 evidence and its log lines: summed, and of every call.

    Of every call their number depends on how samples fill microbatches; it is that of full-length samples.
    """
    parallel, steps = config.parallel, checked_steps(config)
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
    return summed, calls * (_RECORD_COMPRESSED + _LINES_BYTES) + min(latest, calls * _RECORD_BYTES)


def checked_steps(config: RunConfig) -> int:
    """Rollouts whose replay is proved (--r3-check-interval)."""
    interval = config.replay.r3_check_interval
    return sum(is_checked(n, interval) for n in range(config.rollout.num_rollout))


def evidence_text(config: RunConfig, hf: HfModelFacts, world_size: int) -> str:
    """Words for ``evidence_bytes``."""
    summed, whole = evidence_bytes(config, hf, world_size)
    steps = f"of {checked_steps(config):,} steps on {world_size} rank{'s' * (world_size != 1)}"
    if config.sums_evidence:
        return f"about {amount(summed)} {steps}, summed"
    return (
        f"at most {amount(whole)} {steps}, a record and two log lines a router call;"
        f" {amount(summed)} with --r3-evidence summed"
    )

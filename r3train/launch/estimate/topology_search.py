"""Topologies of a model on so many GPUs, and what each rank of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import check_model
from r3train.config.cross_checks import check_static
from r3train.config.parallel_settings import ParallelSection
from r3train.config.sources import ConfigError
from r3train.launch.estimate.memory_use import Model, StageRanks, stages

# of a GPU for CUDA's context, NCCL's buffers and the allocator's fragments
MARGIN = 0.1
_MOST_STAGES = 16
# ways to less memory, each slower than the one before: (whole layers recomputed, optimizer's state on the host)
WAYS = ((False, False), (True, False), (False, True), (True, True))
_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_OF_HOST = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
_ON_HOST = {"use_precision_aware_optimizer": True} | _OF_HOST


@dataclass(frozen=True)
class Fit:
    """A topology, and its fullest rank."""

    config: RunConfig
    fullest: StageRanks

    @property
    def cost(self) -> tuple[int, ...]:
        """Numbers to keep small: ranks that share a sample, ranks that share the experts, bytes."""
        p = self.config.parallel
        return p.dense_ranks, p.expert_tensor_parallel_size, p.expert_ranks, int(self.fullest.total)

    @property
    def name(self) -> str:
        """Its sizes above 1, such as "TP4 EP8", and its ways to less memory."""
        p = self.config.parallel
        sizes = {
            "TP": p.tensor_model_parallel_size,
            "PP": p.pipeline_model_parallel_size,
            "EP": p.expert_model_parallel_size,
            "ETP": p.expert_tensor_parallel_size,
            "CP": p.context_parallel_size,
        }
        words = [f"{word}{size}" for word, size in sizes.items() if size > 1] or ["no split"]
        if self.config.model.recompute_granularity is not None:
            words.append("recompute")
        if self.config.trainer.optimizer_overrides.get("optimizer_cpu_offload"):
            words.append("offload")
        return " ".join(words)


def fullest_rank(config: RunConfig, model: Model, world_size: int) -> Fit:
    """Return a configuration with its fullest rank; raises ConfigError for one that would be refused."""
    check_static(config, world_size)
    check_model(config, model.hf, world_size)
    found = stages(config, model, world_size)
    return Fit(config, max(found, key=lambda stage: stage.total))


def search(
    config: RunConfig, model: Model, world_size: int, most_bytes: float, count: int
) -> list[Fit]:
    """Return the ``count`` best topologies with at most so many bytes in a rank; where none fits, the smallest.

    Those without recomputation and with the optimizer's state on the GPU come first.  Samples may be as long as
    in ``config``, so context parallelism shortens a rank's part of a microbatch.  Raises ConfigError where every
    topology is refused.
    """
    found, every = [], []
    refused: ConfigError | None = None
    for recompute, on_host in WAYS:
        if on_host and not (config.model.bf16 and config.trainer.optimizer == "adam"):
            continue
        fits = []
        for parallel in _topologies(config, model, world_size):
            try:
                candidate = _candidate(config, parallel, recompute=recompute, on_host=on_host)
                fits.append(fullest_rank(candidate, model, world_size))
            except ConfigError as error:
                refused = error
        every += fits
        found += sorted(
            (fit for fit in fits if fit.fullest.total <= most_bytes), key=lambda fit: fit.cost
        )
        if len(found) >= count:
            return found[:count]
    if not every and refused is not None:
        raise refused
    return found or [min(every, key=lambda fit: fit.fullest.total)]


def _topologies(config: RunConfig, model: Model, world_size: int) -> Iterator[ParallelSection]:
    hf, parallel = model.hf, config.parallel
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    in_node = [n for n in (1, 2, 4, 8) if n in sizes]
    stages_ = [n for n in sizes if n <= min(_MOST_STAGES, hf.num_hidden_layers)]
    experts = [n for n in sizes if hf.is_moe and hf.num_experts % n == 0] or [1]
    splits = in_node if hf.is_moe else [1]
    for tp, pp, cp, ep, etp in product(in_node, stages_, in_node, experts, splits):
        if world_size % (tp * pp * cp) or world_size % (ep * etp * pp):
            continue
        # experts are split only where no more ranks can share them whole
        ends = _ends(hf.num_hidden_layers, pp)
        if ends is None or etp > 1 and ep < max(experts):
            continue
        yield parallel.model_copy(
            update=dict(
                tensor_model_parallel_size=tp,
                sequence_parallel=tp > 1,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=None,
                pipeline_model_parallel_layout=None,
                decoder_first_pipeline_num_layers=ends[0],
                decoder_last_pipeline_num_layers=ends[1],
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
            )
        )


def _ends(layers: int, stages: int) -> tuple[int | None, int | None] | None:
    """Return the layers of the first and of the last stage, two Nones where all stages have equally many.

    Returns None for a number of stages of which some would have no layer.
    """
    if layers % stages == 0:
        return None, None
    ends = layers - -(-layers // stages) * (stages - 2)
    return (ends // 2, ends - ends // 2) if ends >= 2 else None


def _candidate(
    config: RunConfig, parallel: ParallelSection, *, recompute: bool, on_host: bool
) -> RunConfig:
    tokens = config.trainer.max_tokens_per_gpu * config.parallel.context_parallel_size
    given = config.trainer.optimizer_overrides
    trainer = dict(
        max_tokens_per_gpu=-(-tokens // parallel.context_parallel_size),
        optimizer_overrides=(
            _ON_HOST if on_host else {k: v for k, v in given.items() if k not in _OF_HOST}
        ),
    )
    model = {key: value if recompute else None for key, value in _RECOMPUTE.items()}
    return config.model_copy(
        update=dict(
            parallel=parallel,
            model=config.model.model_copy(update=model | {"recompute_modules": ()}),
            trainer=config.trainer.model_copy(update=trainer),
        )
    )

"""The layers that each rank holds, by arithmetic only.

The trainer reads ``router.layer_number`` from the modules that it built.  This module computes the
same map without a model: for start-up checks, for slices of models that do not fit on this machine,
and as an oracle for the trainer's map.
"""

from __future__ import annotations

from collections.abc import Sequence

from r3train.config.hf_facts import HfModelFacts
from r3train.config.model_settings import ModelSection
from r3train.config.parallel_settings import ParallelSection
from r3train.config.pipeline_layout import parse_pipeline_layout


def stage_layer_numbers(
    num_layers: int,
    pp_size: int,
    *,
    vpp_size: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> list[list[tuple[int, ...]]]:
    """1-based layer numbers of every model chunk, as [pp rank][vp stage].

    ``first`` and ``last`` are the layer counts of the first and last pipeline stage when they
    differ from the rest (Megatron's --decoder-first/last-pipeline-num-layers).
    Raises ValueError when the layers do not divide.
    Source: Megatron-Core get_transformer_layer_offset.
    """
    counts = _stage_counts(num_layers, pp_size, first, last)
    if any(c % vpp_size for c in counts):
        raise ValueError(
            f"stage layer counts {counts} must divide by virtual_pipeline_model_parallel_size "
            f"= {vpp_size}"
        )
    return chunk_layer_numbers([[c // vpp_size for c in counts]] * vpp_size)


def chunk_layer_numbers(counts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """1-based layer numbers as [pp rank][vp stage] from the layer count of each [vp stage][pp rank].

    The general case (Megatron's pipeline_model_parallel_layout): layers run through all stages of
    the first virtual one, then of the next.
    """
    out: list[list[tuple[int, ...]]] = [[] for _ in counts[0]]
    start = 1
    for stage in counts:
        for rank, count in enumerate(stage):
            out[rank].append(tuple(range(start, start + count)))
            start += count
    return out


def _stage_counts(num_layers: int, pp_size: int, first: int | None, last: int | None) -> list[int]:
    fixed = [c for c in (first, last) if c is not None]
    if pp_size == 1 and fixed and sum(fixed) != num_layers:
        raise ValueError(f"one pipeline stage holds all {num_layers} layers, not {fixed}")
    middle = pp_size - len(fixed)
    num_left = num_layers - sum(fixed)
    if num_left < 0 or (middle == 0 and num_left) or (middle and num_left % middle):
        raise ValueError(
            f"{num_layers} layers do not divide over {pp_size} pipeline stages with first="
            f"{first} and last={last}: {num_left} layers are left for {middle} stages"
        )
    each = [num_left // middle] * middle if middle else []
    return ([first] if first is not None else []) + each + ([last] if last is not None else [])


def recomputed_layers(
    chunk_layers: tuple[int, ...],
    *,
    granularity: str | None,
    method: str | None,
    num_layers: int | None,
    modules: tuple[str, ...],
    module: str = "moe",
) -> tuple[int, ...]:
    """Layers of one chunk whose router, or another module, runs a second time in backward.

    Full uniform recomputes all; full block the first ``num_layers`` of the chunk; selective only
    when the ``module`` is recomputed: ``moe`` is the router's, ``core_attn`` an indexer's.
    Source: Megatron-Core TransformerBlock, MoELayer and MultiLatentAttention.
    """
    if granularity == "full":
        return chunk_layers if method == "uniform" else chunk_layers[: num_layers or 0]
    if granularity == "selective" and module in modules:
        return chunk_layers
    return ()


def layers_by_stage(parallel: ParallelSection, hf: HfModelFacts) -> list[list[tuple[int, ...]]]:
    """1-based layer numbers of every chunk, as [pp rank][vp stage]; raises ValueError if they do not divide."""
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_pipeline_layout(
            parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
        )
    return stage_layer_numbers(
        hf.num_hidden_layers,
        parallel.pipeline_model_parallel_size,
        vpp_size=parallel.virtual_pipeline_model_parallel_size or 1,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
    )


def recomputed_moe_layers(
    parallel: ParallelSection, model: ModelSection, hf: HfModelFacts
) -> tuple[int, ...]:
    """Numbers of the MoE layers whose router runs a second time in backward."""
    layers = layers_with_recomputed("moe", parallel, model, hf)
    return tuple(layer for layer in layers if layer in hf.moe_layer_numbers)


def layers_with_recomputed(
    module: str, parallel: ParallelSection, model: ModelSection, hf: HfModelFacts
) -> tuple[int, ...]:
    """Numbers of the layers of which a module runs a second time in backward, see ``recomputed_layers``."""
    return tuple(
        layer
        for stage in layers_by_stage(parallel, hf)
        for chunk in stage
        for layer in recomputed_layers(
            chunk,
            granularity=model.recompute_granularity,
            method=model.recompute_method,
            num_layers=model.recompute_num_layers,
            modules=model.recompute_modules,
            module=module,
        )
    )

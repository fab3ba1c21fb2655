"""The layers that each rank holds, by arithmetic only, and Megatron's layout language for uneven stages.

The trainer reads ``router.layer_number`` from the modules that it built.  This module computes the same map without a
model: for start-up checks, for slices of models that do not fit on this machine, and as an oracle for the trainer's map.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from r3train.config.parallel_settings import ParallelSection

_REPEATED_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"(.)\*(\d+)")


def parse_pipeline_layout(layout: str, pp_size: int) -> list[list[tuple[int, ...]]]:
    """1-based decoder layer numbers of every chunk, as [pp rank][vp stage].

    ``layout`` lists the chunks in the order of the forward pass, with ``|`` between them.  E is the
    embedding, t a decoder layer, m a multi-token-prediction layer, L the loss.  ``x*n`` and
    ``(...)*n`` repeat.  Commas mean nothing.  "Et*7|(t*8|)*6t*6L" is 61 layers in 8 chunks.
    Raises ValueError for other letters, for a chunk count that pp_size does not divide, and for an
    embedding or a loss outside the first or the last chunk.
    Source: Megatron-Core 0.19.2, --pipeline-model-parallel-layout.
    """
    text = layout.replace(",", "").replace(" ", "")
    text = _REPEATED_GROUP.sub(lambda m: m[1] * int(m[2]), text)
    text = _REPEATED_LETTER.sub(lambda m: m[1] * int(m[2]), text)
    if unknown := set(text) - set("EtmL|"):
        raise ValueError(
            f"pipeline_model_parallel_layout {layout!r} holds {sorted(unknown)}; known are E (embedding),"
            " t (decoder layer), m (MTP layer), L (loss), | between chunks, *n and ()"
        )
    chunks = text.split("|")
    if len(chunks) % pp_size:
        raise ValueError(
            f"pipeline_model_parallel_layout {layout!r} has {len(chunks)} chunks, which"
            f" pipeline_model_parallel_size {pp_size} does not divide"
        )
    for letter, chunk, place in (("E", chunks[0], "first"), ("L", chunks[-1], "last")):
        if text.count(letter) != 1 or letter not in chunk:
            raise ValueError(
                f"pipeline_model_parallel_layout {layout!r} must hold {letter} once, in the"
                f" {place} chunk"
            )
    stages: list[list[tuple[int, ...]]] = [[] for _ in range(pp_size)]
    start = 1
    for i, chunk in enumerate(chunks):
        count = chunk.count("t")
        stages[i % pp_size].append(tuple(range(start, start + count)))
        start += count
    return stages


def stage_layer_numbers(
    num_layers: int,
    pp_size: int,
    *,
    vpp_size: int,
    first: int | None,
    last: int | None,
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


def layers_by_stage(parallel: ParallelSection, num_layers: int) -> list[list[tuple[int, ...]]]:
    """1-based layer numbers of every chunk, as [pp rank][vp stage]; raises ValueError if they do not divide."""
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_pipeline_layout(
            parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
        )
    return stage_layer_numbers(
        num_layers,
        parallel.pipeline_model_parallel_size,
        vpp_size=parallel.virtual_pipeline_model_parallel_size or 1,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
    )

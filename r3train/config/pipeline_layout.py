"""Megatron's layout language for pipelines with uneven stages."""

from __future__ import annotations

import re

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

"""Index maps: the token of each padded row, on each rank.

Packing, context-parallel zigzag and sequence-parallel chunking all act on one integer array,
``rows``.  Every stream (tokens, labels, routes, uids, ...) then goes through the same
``take_rows``, so rows can be misaligned in one place only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.types import TokenLayout

PADDING = -1
# rows that a run must hold on average, for one copy of each run to be faster than an index of all rows
_LONG_RUN = 16
_BLOCK_ROWS = 128  # rows of routes turned at a time: some tens of kilobytes, which stay in the core's own cache

# (begin, end, first row) of adjoining rows, or of one padding row
Runs = list[tuple[int, int, int]]


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def pack_layout(lengths: np.ndarray, *, cp_size: int, tp_size: int = 1) -> TokenLayout:
    """Lay samples end to end, padded so that every rank's share is whole.

    lengths: int[B] tokens of each sample, each at least 1; B = 0 gives a pack of padding only
    (a rank that has no sample for a microbatch must still take part in it).
    Each sample is padded to a multiple of 2*cp (the zigzag needs 2*cp chunks); the pack to a
    multiple of 2*cp*tp, by a tail that is a pseudo-sequence of its own.  ``tp_size`` is 1 without
    sequence parallelism.

    Source: Transformer Engine asks 2*cp of every packed sequence (thd_get_partitioned_indices).
    """
    lengths = np.asarray(lengths, dtype=np.int32)
    assert (lengths > 0).all(), f"a sample has no tokens: {lengths.tolist()}"
    sequence_multiple = 2 * cp_size if cp_size > 1 else 1
    pack_multiple = sequence_multiple * tp_size
    padded = -(-lengths // sequence_multiple) * sequence_multiple
    total = int(padded.sum())
    tail = max(round_up(total, pack_multiple), pack_multiple) - total
    ends = np.cumsum(np.concatenate([[0], padded, [tail] if tail else []])).astype(np.int32)

    rows = np.full(total + tail, PADDING, dtype=np.int64)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    flat = np.arange(int(lengths.sum()), dtype=np.int64)
    flat_starts = np.cumsum(lengths, dtype=np.int64) - lengths
    rows[ends[sequence] + (flat - flat_starts[sequence])] = flat
    return TokenLayout(lengths=lengths, cu_seqlens_padded=ends, rows=rows)


def cp_rows(
    rows: np.ndarray, cu_seqlens_padded: np.ndarray, cp_size: int, cp_rank: int
) -> np.ndarray:
    """Rows owned by one context-parallel rank: chunks r and 2c-1-r of every sequence.

    rows: int64[N], -1 marks padding.  Returns int64[N / c].
    Raises ValueError unless every padded length divides by 2c.
    Source: Transformer Engine's thd_get_partitioned_indices order.
    """
    if cp_size == 1:
        return rows
    starts, lengths = cu_seqlens_padded[:-1], np.diff(cu_seqlens_padded)
    if (lengths % (2 * cp_size)).any():
        raise ValueError(
            f"padded lengths {lengths.tolist()} must divide by 2*cp = {2 * cp_size} "
            "to be split over context-parallel ranks"
        )
    chunks = lengths // (2 * cp_size)
    chunk_starts = np.stack(
        [starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], axis=1
    )
    return np.concatenate(
        [
            rows[start : start + n]
            for pair, n in zip(chunk_starts.tolist(), chunks.tolist())
            for start in pair
        ]
    )


def sp_rows(rows: np.ndarray, tp_size: int, tp_rank: int) -> np.ndarray:
    """Rows that one tensor-parallel rank's routers see under sequence parallelism.

    rows: int64[n], the rank's context-parallel share.  Returns the contiguous chunk int64[n / tp].
    Source: Megatron scatters the embedding output along the first dimension in rank order.
    """
    assert rows.shape[0] % tp_size == 0, (rows.shape, tp_size)
    share = rows.shape[0] // tp_size
    return rows[tp_rank * share : (tp_rank + 1) * share]


def take_rows(
    stream: np.ndarray, rows: np.ndarray, fill: int | float | bool, runs: Runs | None = None
) -> np.ndarray:
    """Gather a flat stream into padded rows.

    stream: [F, ...]; rows: int64[n] indices into it, -1 for padding; runs: ``runs_of(rows)``, where the
    caller takes several streams by the same rows.  Returns [n, ...] of the same dtype, ``fill`` in padding rows.
    """
    out = np.empty((rows.shape[0], *stream.shape[1:]), dtype=stream.dtype)
    runs = runs_of(rows) if runs is None else runs
    if not runs:
        if stream.shape[0]:
            # clip, then overwrite: -1 would otherwise read the last token
            np.take(stream, rows, axis=0, out=out, mode="clip")
        out[rows == PADDING] = fill
        return out
    for begin, end, row in runs:
        out[begin:end] = fill if row == PADDING else stream[row : row + end - begin]
    return out


def runs_of(rows: np.ndarray) -> Runs:
    """Split rows into runs of adjoining ones, to be copied at once; [] where they are too short to gain.

    A sample is one run of rows (two under context parallelism).
    """
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *breaks.tolist(), rows.shape[0]]
    if len(bounds) > 2 + rows.shape[0] // _LONG_RUN:
        return []
    runs = []
    for begin, end in zip(bounds, bounds[1:]):
        row = int(rows[begin]) if begin < end else 0
        if row == PADDING:  # -1, 0, 1, ... counts up too: the padding is its first row only
            runs.append((begin, begin + 1, PADDING))
            begin, row = begin + 1, 0
        if begin < end:
            runs.append((begin, end, row))
    return runs


def take_routes(
    parts: Sequence[np.ndarray],
    layer_numbers: np.ndarray,
    rows: np.ndarray,
    fill: int,
    runs: Runs | None = None,
) -> np.ndarray:
    """Gather the routes of some layers (numbers from 1) into padded rows, in one copy.

    parts: at least one [f, L, K], end to end a stream [F, L, K]; rows, runs: as for ``take_rows``.
    Returns [m, l, K], which lies in memory layer by layer, as the routers read it.
    """
    if layer_numbers.size and (np.diff(layer_numbers) == 1).all():
        layer_parts = [part[:, layer_numbers[0] - 1 : layer_numbers[-1]] for part in parts]
    else:
        # np.take copies per layer's K experts in one go, fancy indexing one by one: ten times slower
        layer_parts = [np.take(part, layer_numbers - 1, axis=1) for part in parts]
    runs = runs_of(rows) if runs is None else runs
    if not runs:
        layer_parts, runs = [take_rows(np.concatenate(layer_parts), rows, fill)], [
            (0, rows.shape[0], 0)
        ]
    starts = np.cumsum([0, *map(len, layer_parts)])
    num_layers, topk = layer_parts[0].shape[1:]
    out = np.empty((num_layers, rows.shape[0], topk), layer_parts[0].dtype).swapaxes(0, 1)
    for begin, end, row in runs:
        if row == PADDING:
            out[begin:end] = fill
            continue
        part = int(np.searchsorted(starts, row, side="right")) - 1
        while begin < end:
            source = layer_parts[part][row - starts[part] :][: end - begin]
            _turn(source, out[begin : begin + len(source)])
            begin, row, part = begin + len(source), row + len(source), part + 1
    return out


def _turn(source: np.ndarray, target: np.ndarray) -> None:
    """Copy routes [n, l, K] into an array that lies in memory layer by layer, a block of rows at a time."""
    row_bytes = source.shape[2] * source.itemsize
    if row_bytes in (2, 4, 8) and source.strides[2] == source.itemsize:  # a row is one number
        source, target = source.view(f"u{row_bytes}"), target.view(f"u{row_bytes}")
    for first in range(0, len(source), _BLOCK_ROWS):
        target[first : first + _BLOCK_ROWS] = source[first : first + _BLOCK_ROWS]


def take_ragged(
    counts: np.ndarray, values: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gather a flat stream of several values per token into padded rows.

    counts: int[F]; values: [counts.sum()], token after token; rows: int64[n] as for ``take_rows``.
    Returns (counts[n], values of these rows, row after row); a padding row has none.
    """
    row_counts = take_rows(counts, rows, 0)
    starts = take_rows(np.cumsum(counts, dtype=np.int64) - counts, rows, 0)
    before = np.cumsum(row_counts, dtype=np.int64) - row_counts
    places = np.arange(int(row_counts.sum()), dtype=np.int64) + np.repeat(
        starts - before, row_counts
    )
    return row_counts, values[places]

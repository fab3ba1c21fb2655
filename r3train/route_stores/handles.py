"""Handles: one number for each route row that a store keeps.

The row with index 5 under key 7 has handle ``7 << 24 | 5``; of three stores, store 7 % 3 = 1 keeps
it.  Keys begin at 1.  The missing marker, as for rows, is the dtype's largest value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from r3train.ids import HANDLE_ROW_BITS
from r3train.types import RouteShape


class HandleShape(RouteShape):
    """A row of one number: uint64[1, 1]."""

    __slots__ = ()

    @property
    def dtype(self) -> np.dtype:
        """uint64, whatever the number of experts."""
        return np.dtype(np.uint64)


HANDLES = HandleShape(num_layers=1, topk=1, num_experts=0)


class Run(NamedTuple):
    """Adjoining rows [start, stop) of a key; the key is None for missing rows."""

    first: int  # place of the first row among all handles
    key: int | None
    start: int
    stop: int


def issue(key: int, count: int) -> np.ndarray:
    """Make the handles of all rows under a key: uint64[count, 1, 1]."""
    assert key > 0 and count < 1 << HANDLE_ROW_BITS, (key, count)
    first = np.uint64(key << HANDLE_ROW_BITS)
    return (first + np.arange(count, dtype=np.uint64)).reshape(-1, *HANDLES.row)


def runs(handles: np.ndarray) -> Iterator[Run]:
    """Split handles, uint64[R, 1, 1], into the fewest runs of adjoining rows, in order."""
    numbers = handles.reshape(-1)
    before, after = numbers[:-1], numbers[1:]
    missing = np.uint64(HANDLES.missing)
    joined = (after == before + np.uint64(1)) | ((after == missing) & (before == missing))
    edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(numbers)]
    for first, end in zip(edges, edges[1:]):
        if first == end:
            continue
        number = int(numbers[first])
        if number == HANDLES.missing:
            yield Run(first, None, 0, end - first)
        else:
            key, start = number >> HANDLE_ROW_BITS, number & ((1 << HANDLE_ROW_BITS) - 1)
            yield Run(first, key, start, start + end - first)

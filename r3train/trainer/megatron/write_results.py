"""What a checkpoint's forked writer tells the rank that it was forked from.

Megatron-core (0.16.1, ``filesystem_async``) makes a multiprocessing Manager for this: a process
that every rank spawns at its first save (seconds of imports), and that outlives a rank killed with
SIGKILL.  A pipe would not do either: the rank reads once the writer has ended, and the writer could
not end while a full pipe waits to be read.
"""

from __future__ import annotations

import os
import pickle
from queue import Empty
from typing import Any


class WriteResults:
    """A queue of at most one entry in memory that a forked child shares with its parent."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("r3train-write-results")

    def put(self, value: Any) -> None:
        """Leave the entry, in the place of any earlier one."""
        data = memoryview(pickle.dumps(value))  # never leaves these two processes
        os.ftruncate(self._handle, 0)
        written = 0
        while written < len(data):
            written += os.pwrite(self._handle, data[written:], written)

    def get_nowait(self) -> Any:
        """Take the entry; raises queue.Empty where there is none."""
        size = os.fstat(self._handle).st_size
        if not size:
            raise Empty
        data = bytearray()
        while len(data) < size:
            data += os.pread(self._handle, size - len(data), len(data))
        os.ftruncate(self._handle, 0)
        return pickle.loads(bytes(data))

    def __del__(self) -> None:
        os.close(self._handle)

"""The result that a checkpoint's forked writer returns to its rank.

Megatron-core (0.19.2, ``filesystem_async``) starts a multiprocessing Manager for this.  Every rank
would spawn that process at its first save, with seconds of imports, and it would outlive a rank
killed with SIGKILL.  A pipe does not work: the rank reads only after the writer has ended, and the
writer cannot end while the pipe is full.
"""

from __future__ import annotations

import os
import pickle
import weakref
from queue import Empty
from typing import Any


class WriteResults:
    """A queue of at most one entry, in memory that a forked child shares with its parent."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("r3train-write-results")
        weakref.finalize(self, os.close, self._handle)

    def put(self, value: Any) -> None:
        """Store the entry; it replaces an earlier one."""
        with open(self._handle, "wb", closefd=False) as file:
            file.truncate(0)
            file.seek(0)
            pickle.dump(value, file)  # never leaves these two processes

    def get_nowait(self) -> Any:
        """Take the entry; raises queue.Empty if there is none."""
        with open(self._handle, "rb", closefd=False) as file:
            file.seek(0)
            data = file.read()
        if not data:
            raise Empty
        os.ftruncate(self._handle, 0)
        return pickle.loads(data)

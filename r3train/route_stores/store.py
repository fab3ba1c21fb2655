"""The rows that a route store keeps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from r3train.engine.backend import (
    AnswerCutShort,
    AnswerLate,
    AnswerRefused,
    EngineBusy,
    EngineError,
    EngineUnreachable,
)

# errors of an answer, subclasses first: rank 0 raises the same error again
FAILURES: dict[str, type[Exception]] = {
    "cut_short": AnswerCutShort,
    "late": AnswerLate,
    "unreachable": EngineUnreachable,
    "refused": AnswerRefused,
    "busy": EngineBusy,
    "engine": EngineError,
    "value": ValueError,
}
# number of remembered keys that were released before their rows came (a cancelled request)
_REMEMBERED_KEYS = 1 << 16


class RouteStoreError(RuntimeError):
    """A route store cannot be reached or lacks rows that it must hold; it ends the run."""


class RouteStore:
    """Decoded rows by key; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows_by_key: dict[int, np.ndarray] = {}
        self._released_keys: OrderedDict[int, None] = OrderedDict()
        self.held_bytes = 0
        self.wire_bytes = 0  # base64 text received so far

    def put(self, key: int, rows: np.ndarray, wire_bytes: int = 0) -> None:
        """Keep rows, uint8/uint16 [R, L, K], unless their key has been released already."""
        rows = np.ascontiguousarray(rows)
        with self._lock:
            self.wire_bytes += wire_bytes
            if self._released_keys.pop(key, key) is None:
                return
            assert key not in self._rows_by_key, f"key {key} is taken"
            self._rows_by_key[key] = rows
            self.held_bytes += rows.nbytes

    def rows(self, key: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a key, a view.  Raises RouteStoreError where they are not held."""
        with self._lock:
            rows = self._rows_by_key.get(key)
        if rows is None or not 0 <= start <= stop <= len(rows):
            held = "nothing" if rows is None else f"rows 0..{len(rows) - 1}"
            raise RouteStoreError(f"rows {start}..{stop - 1} of key {key} are asked, held: {held}")
        return rows[start:stop]

    def release(self, keys: Sequence[int]) -> None:
        """Free the rows of keys; rows that come later under such a key are not kept."""
        with self._lock:
            for key in keys:
                rows = self._rows_by_key.pop(key, None)
                if rows is not None:
                    self.held_bytes -= rows.nbytes
                    continue
                self._released_keys[key] = None
                if len(self._released_keys) > _REMEMBERED_KEYS:
                    self._released_keys.popitem(last=False)

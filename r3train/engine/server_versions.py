"""Which weights each server holds, as far as this job knows: one that missed an update is left out.

Engine control writes (from the training thread), the client reads (in the producer's loop).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class ServerVersions:
    """The weight version of every server, None while it is unknown: before the first update of a
    server of somebody else's, during every update, and after a failed one.  Thread-safe."""

    def __init__(self, versions: Sequence[int | None]) -> None:
        self._lock = threading.Lock()
        self._versions = list(versions)

    def unknown(self, server: int | None = None) -> None:
        """From now on nobody knows what a server holds (all of them, when None)."""
        with self._lock:
            for i in range(len(self._versions)) if server is None else (server,):
                self._versions[i] = None

    def record(self, version: int, server: int | None = None) -> None:
        """A server (all of them, when None) holds ``version``, whole."""
        with self._lock:
            for i in range(len(self._versions)) if server is None else (server,):
                self._versions[i] = version

    def holders(self, version: int) -> list[int]:
        """Servers that hold ``version`` or newer weights."""
        with self._lock:
            return [i for i, v in enumerate(self._versions) if v is not None and v >= version]

    def all(self) -> list[int | None]:
        with self._lock:
            return list(self._versions)

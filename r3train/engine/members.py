"""The servers of a run by number: which are present, and the weight version that each holds.

A number is given once, so evidence that names it names one life of one server: one that is started again, or was taken for lost, is
another member.  External servers come and go like this, where the settings let them (``launch.start.discovery``):

    numbered ---> joined ---------------> lost     it gave no sign of life, or failed a call
        |           |---> leaving ------> left     its address was taken back: its calls end first
        |           `-------------------> refused  it holds other weights than were sent
        `---> refused                              it does not go with the run

Those of the run itself keep their numbers for good: one that is restarted (``engine.supervisor``) is lost, and joins again without
weights.  What it held before is evidence on what it holds then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from r3train.engine.addresses import base_url


@dataclass(frozen=True)
class Change:
    """A server that came or went, a line of ``servers.jsonl``; what: joined, refused, leaving, left or lost."""

    time: float
    server: int
    url: str
    what: str
    version: int | None
    why: str


class Members:
    """The servers of a run; thread-safe.

    A server's version is None while it is unknown: before the first update of one that this job did not start, during
    every update, and after a failed one.  The training thread writes it through ``EngineControl``, the client reads.

    changes: servers come and go; otherwise all of ``addrs`` are present for good.  on_change: told of each change in the
    thread that made it.  on_leave: called with the number of a server that has gone.
    """

    def __init__(
        self,
        addrs: Sequence[str],
        versions: Sequence[int | None] | None = None,
        *,
        changes: bool = False,
        on_change: Callable[[Change], None] = lambda change: None,
    ) -> None:
        self._lock = threading.Lock()
        self.urls = [base_url(addr) for addr in addrs]  # by number; it only grows
        self._versions = list(versions or [None] * len(addrs))
        self._present = set(range(len(addrs)))
        # those that have held weights of this run
        self._proven = {i for i, version in enumerate(self._versions) if version is not None}
        self.leaving: set[int] = set()  # those of them that get no new request
        self._gone: set[int] = set()
        self.refused: set[int] = set()  # those of them that did not hold what they should
        self._requests_wait = False
        self._excused: set[str] = set()  # addresses
        self._newest = max((v for v in self._versions if v is not None), default=None)
        self.changes = changes
        self._on_change = on_change
        self.on_leave: list[Callable[[int], None]] = []

    @property
    def newest(self) -> int | None:
        """The newest weights that a server has ever held, None before the first are known."""
        return self._newest

    def present(self) -> list[int]:
        """The servers that are members now."""
        with self._lock:
            return sorted(self._present)

    def is_new(self, server: int) -> bool:
        """True for a member that has held no weights of this run yet, where others have."""
        with self._lock:
            is_one = server in self._present and server not in self._proven
            return is_one and self._newest is not None

    def is_gone(self, server: int | None) -> bool:
        """True once a member has left."""
        return server in self._gone

    def excuse(self, server: int) -> bool:
        """Excuse a server for a broken broadcast, which may be another one's fault.

        True the first time for its address, and again once it has held weights.
        """
        with self._lock:
            is_first = self.urls[server] not in self._excused
            self._excused.add(self.urls[server])
            return is_first

    def number(self, addr: str) -> int:
        """Number a server that may join; raises ValueError for an address without a port."""
        with self._lock:
            self.urls.append(base_url(addr))
            self._versions.append(None)
            return len(self.urls) - 1

    def join(self, server: int, version: int | None, why: str) -> None:
        """Make a server a member, which holds all weights of ``version``; None: it gets no request before an update."""
        with self._lock:
            self._present.add(server)
            self._gone.discard(server)
        self.record(version, server)
        self._tell(server, "joined", version, why)

    def refuse(self, server: int, why: str) -> None:
        """Tell of a server that does not join."""
        self._tell(server, "refused", None, why)

    def take_back(self, server: int, why: str) -> None:
        """Send a server no new request."""
        with self._lock:
            if server in self.leaving:
                return
            self.leaving.add(server)
        self._tell(server, "leaving", self._versions[server], why)

    def leave(self, server: int, why: str, what: str = "lost") -> None:
        """Take a server out for good, unless it has gone; one that was to join does not, and its calls end."""
        with self._lock:
            if server in self._gone:
                return
            was_present = server in self._present
            self._present.discard(server)
            self._gone.add(server)
            if what == "refused":
                self.refused.add(server)
            version, self._versions[server] = self._versions[server], None
        if was_present:
            self._tell(server, what, version, why)
        for told in list(self.on_leave):
            told(server)

    def _tell(self, server: int, what: str, version: int | None, why: str) -> None:
        self._on_change(Change(time.time(), server, self.urls[server], what, version, why))

    def record(self, version: int | None, server: int | None = None) -> None:
        """Note that a server, or every present one, holds all weights of ``version``; None: nobody knows which."""
        with self._lock:
            recorded = self._present & (self._present if server is None else {server})
            for i in recorded:
                self._versions[i] = version
            if version is not None and recorded:
                self._excused -= {self.urls[i] for i in recorded}
                self._proven |= recorded
                self._newest = max(version, -1 if self._newest is None else self._newest)

    def holders(self, version: int) -> list[int]:
        """Servers that hold ``version`` or newer weights, but for those that get no new request."""
        with self._lock:
            return [
                i
                for i in sorted(self._present - self.leaving)
                if (v := self._versions[i]) is not None and v >= version
            ]

    def askable(self, version: int) -> list[int]:
        """The holders of ``version``, none in ``requests_wait``."""
        return [] if self._requests_wait else self.holders(version)

    @contextmanager
    def requests_wait(self) -> Iterator[None]:
        """Send no request in the block, because what servers hold is judged first.

        After an error none is sent until a later block has ended well.
        """
        self._requests_wait = True
        yield
        self._requests_wait = False

    def ready(self) -> list[int]:
        """Servers that may be asked: they hold some weights of the run, whichever."""
        return self.holders(0)

    def all(self) -> list[int | None]:
        """The version of every server that was numbered."""
        with self._lock:
            return list(self._versions)

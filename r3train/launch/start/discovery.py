"""Discovery of servers (--rollout-engines-file): those of others join a run and leave it while it goes on; threads of rank 0.

Every second one reads the addresses that are named, and asks all members for a sign of life; another for each address admits it:

    a new address         the run's checks, the newest weights, checksums and scores of a server that holds them: it joins
                          without such a server, or by broadcast: it joins, and gets its first request after an update
    one that is refused   said once; tried again every 5 s, but what holds other weights not before its name was away
    one that is away      no new request; it leaves when its calls have ended
    no sign of life       it leaves, and its calls go on elsewhere

``lock`` is held while an update goes on: nobody joins in the middle of one.  No update waits for a server that joins: one that
has loaded weights meanwhile which are the newest no more joins as by broadcast.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from r3train.engine.address_files import read_addresses
from r3train.engine.backend import EngineBusy, EngineError, EngineUnreachable, ServerLeft
from r3train.engine.control import EngineControl
from r3train.engine.members import Members
from r3train.engine.publish import WeightPublisher

logger = logging.getLogger(__name__)

EVERY_S = 1.0
AGAIN_S = 5.0
_SAID_EVERY_S = 30.0
_SILENT = "it gave no sign of life while it was to join"
_AFTER_AN_UPDATE = "it gets its first request after an update"


@dataclass(eq=False)
class Discovery:
    """Lets servers join and leave.

    source: the file or directory of their addresses.  examine: raises EngineError or ValueError for a server, by its number,
    that does not go with the run.  score: given a server, another one and the version of both, says how far apart their
    scores are, or raises ValueError.  publisher: makes the run's, once a server is known.  is_busy: whether a server has
    requests.  note: says a line.
    """

    source: Path
    members: Members
    control: EngineControl
    examine: Callable[[int], None]
    score: Callable[[int, int, int], str]
    publisher: Callable[[], WeightPublisher]
    is_busy: Callable[[int], bool]
    note: Callable[[str], None]
    health_timeout_s: float
    wait_s: float

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        # an update sends weights: a sound server stays until its end, for leaving would break a broadcast
        self.is_sending = False
        self._named: set[str] = set()  # as read at the last look
        self._numbers: dict[str, int] = {}  # of named servers, by URL
        self._not_before: dict[str, float] = {}  # when one is tried again
        self._banned: set[str] = set()  # until their names were away
        self._tried: set[str] = set()  # in a thread each
        self._first = ""  # the one of them that was tried where nobody was there
        self._said: dict[str, str] = {}  # why a server was refused
        self._alive: dict[int, float] = {}  # the last sign of life
        self._deserted_since = self._next_line = 0.0
        self._unreadable = ""
        self._closed = threading.Event()
        # a server that hangs delays other signs of life, and nobody who joins
        self._threads = [
            threading.Thread(target=self._watch, args=(look,), name="discovery", daemon=True)
            for look in (self._look, lambda: self.let_lost_leave(self._tried.copy()))
        ]

    def start(self) -> None:
        """Begin, and wait until a server has joined; raises EngineError after ``wait_s``."""
        self._deserted_since = time.monotonic()
        for thread in self._threads:
            thread.start()
        while not self.members.present():
            self.check()
            time.sleep(0.1)

    def check(self) -> None:
        """Raise EngineError once no server was there for ``wait_s``."""
        since = self._deserted_since
        if since and time.monotonic() - since > self.wait_s:
            raise EngineError(
                f"no server has joined for {self.wait_s:g} s (--rollout-wait-for-servers-s): {self.source} names"
                f" {len(self._named)}"
            )

    def _watch(self, look: Callable[[], None]) -> None:
        while not self._closed.is_set():
            try:
                look()
            except EngineError as error:
                logger.info("%s", error)  # a server left meanwhile
            except Exception:  # noqa: BLE001 - the run goes on with the servers that it has
                if not self._closed.is_set():
                    logger.exception("the servers that join and leave")
            self._closed.wait(EVERY_S)

    def _look(self) -> None:
        named = self._read()
        if named is not None:
            self._take_back(named)
        # those that were never tried first: where nobody is there, one that does not answer would hold them up
        for url in sorted(
            (named or set()) - self._banned - self._tried,
            key=lambda url: (self._not_before.get(url, 0.0), url),
        ):
            server = self._numbers.get(url)
            was_member = server in self.members.present() or self.members.is_gone(server)
            # the first alone: the others are compared with it
            is_first = not self.members.present()
            waits = is_first and self._first in self._tried
            waits = waits or time.monotonic() < self._not_before.get(url, 0.0)
            if not (was_member or waits):
                self._first = url if is_first else self._first
                self._tried.add(url)
                threading.Thread(target=self._admit, args=(url,), daemon=True).start()
        self._say_if_deserted()

    def _admit(self, url: str) -> None:
        try:
            self._try(url)
        except Exception:  # noqa: BLE001 - the run goes on with the servers that it has
            if not self._closed.is_set():
                logger.exception("%s, which is to join", url)
        finally:
            self._tried.discard(url)

    def _read(self) -> set[str] | None:
        """The URLs that are named; None where they cannot be read, or are being written."""
        try:
            named = read_addresses(self.source)
        except (OSError, ValueError) as error:
            if str(error) != self._unreadable:
                self.note(f"servers stay as they are: {error}")
            self._unreadable = str(error)
            return None
        self._unreadable = ""
        is_settled, self._named = named == self._named, named
        return named if is_settled else None

    def _take_back(self, named: set[str]) -> None:
        self._banned &= named
        for url in self._said.keys() - named:
            self._said.pop(url, None)
        present = self.members.present()
        for url, server in list(self._numbers.items()):
            if self.members.is_gone(server):
                del self._numbers[url]
                self._not_before[url] = time.monotonic() + AGAIN_S
                if server in self.members.refused:
                    self._banned.add(url)
            elif server in present and (url not in named or server in self.members.leaving):
                self.members.take_back(server, f"{self.source} does not name it any more")
        if not self.is_sending:
            self.let_idle_leave()

    def let_idle_leave(self) -> None:
        """Let those leave that are named no more, once their calls have ended."""
        for server in self.members.leaving.intersection(self.members.present()):
            if not self.is_busy(server):
                self.members.leave(server, "its calls have ended", "left")

    def let_lost_leave(self, joining: Collection[str] = ()) -> None:
        """Let servers leave that give no sign of life, and end the tries of those of ``joining``."""
        # SGLang answers /health by a token of its own, which waits while weights are loaded
        loads, now = not self.members.ready(), time.monotonic()
        present = self.members.present()
        numbers = map(self._numbers.get, joining)
        paths = {server: "/model_info" for server in numbers if server is not None}
        paths |= dict.fromkeys(present, "/model_info" if loads else "/health")
        errors = self.control.look_for_life(paths, self.health_timeout_s)
        if not loads and not self.members.ready():
            return  # an update has begun
        for server, error in errors.items():
            if error is None:
                self._alive[server] = time.monotonic()
            elif (
                type(error) is EngineUnreachable and server in present
            ) or time.monotonic() - self._alive.setdefault(server, now) > self.health_timeout_s:
                self.members.leave(server, f"no sign of life: {error}")

    def _try(self, url: str) -> None:
        began = time.monotonic()
        if url not in self._numbers:
            self._numbers[url] = self.members.number(url)
        server, newest = self._numbers[url], None
        self._alive[server] = began
        try:
            self.examine(server)
            with self.lock:
                newest = self._held()
            version, why = self._bring(server, newest)
            with self.lock:
                if url not in self._named:
                    raise ServerLeft(f"{self.source} does not name it any more")
                if self.members.is_gone(server):
                    raise ServerLeft(_SILENT)
                if self._held() != newest:
                    version, why = None, _AFTER_AN_UPDATE
                self.members.join(server, version, f"{why}, {time.monotonic() - began:.2f} s")
            self._said.pop(url, None)
        except (EngineError, ValueError) as error:
            self._not_before[url] = time.monotonic() + AGAIN_S
            was_updated = newest is None or self._held() != newest
            if not was_updated and not isinstance(error, (EngineBusy, EngineUnreachable)):
                self._banned.add(url)
            is_silent = isinstance(error, ServerLeft) and self.members.is_gone(server)
            text = _SILENT if is_silent else str(error)
            if self._said.get(url) != text:
                self._said[url] = text
                self.members.refuse(server, text)

    def _held(self) -> int | None:
        """The newest version, if a server holds it: not in an update, nor after one that failed."""
        newest = self.members.newest
        return newest if newest is not None and self.members.holders(newest) else None

    def _bring(self, server: int, newest: int | None) -> tuple[int | None, str]:
        """Bring a server to the newest weights; returns their version, None where an update has to, and how it was judged.

        Raises ValueError for one that then holds others.
        """
        publisher, version = self.publisher(), None
        self.control.continue_generation(server)
        if newest is not None:  # else all ranks send the weights, and the actor judges
            with self.lock if publisher.overwrites else nullcontext():
                version = publisher.give(server)
        twins = self.members.holders(version) if version is not None else []
        if not twins:
            return None, _AFTER_AN_UPDATE
        label = self.control.weight_versions([server])[server]
        checksums = self.control.weight_checksums([server, twins[0]])
        held, expected = checksums[server], checksums[twins[0]]
        names = held.keys() | expected.keys()
        wrong = sorted(name for name in names if held.get(name) != expected.get(name))
        if label != str(version):
            raise ValueError(f"it says that it holds weights {label}, expected {version}")
        if wrong:
            names = ", ".join(wrong[:4])
            raise ValueError(f"{len(wrong)} tensors are not those of server {twins[0]}: {names}")
        scored = self.score(server, twins[0], version)
        return version, f"{len(held)} tensors are those of server {twins[0]}, {scored}"

    def _say_if_deserted(self) -> None:
        now = time.monotonic()
        if self.members.present():
            self._deserted_since = 0.0
        elif not self._deserted_since:
            self._deserted_since, self._next_line = now, now
        if self._deserted_since and now >= self._next_line:
            self._next_line = now + _SAID_EVERY_S
            self.note(
                f"no server: waiting for one that {self.source} names, for {self.wait_s:g} s at most"
            )

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=10)

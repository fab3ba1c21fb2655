"""Servers of our own that die or hang: noticed, started again, and their requests sent again.

Starting again brings all servers of the job back together, empty and with the weights of the
checkpoint: the caller publishes the current ones before anything is generated.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from r3train.rollout.backend import EngineDied, EngineUnreachable, RolloutBackend
from r3train.rollout.sglang_server import SGLangServer
from r3train.types import RolloutSample

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 60.0
_ASKED_S = 2.0  # health is asked for only while somebody waits for the servers
_POLL_S = 0.1


class EngineSupervisor:
    """Watches the servers that this job owns; thread-safe.

    ``check`` raises EngineDied once a server has ended, or has given no sign of life for
    ``health_timeout_s`` while ``check`` was being called.  ``restart`` may be called
    ``max_restarts`` times in all, the k-th after ``backoff_s * 2**(k-1)`` seconds (60 at most).
    """

    def __init__(
        self,
        servers: Sequence[SGLangServer],
        *,
        max_restarts: int,
        backoff_s: float,
        health_timeout_s: float,
    ) -> None:
        self._servers = list(servers)
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._health_timeout_s = health_timeout_s
        self._lock = threading.Lock()
        self._asked = 0.0
        self._lost: str | None = None
        self._epoch = 0  # grows when the servers serve again
        self._version = 0  # that the servers were brought back with
        self._restarting = False  # from then until ``restored`` a broken request is no news
        self.restarts = 0
        self.resubmitted = 0  # requests that were sent again
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-health", daemon=True)
        self._thread.start()

    @property
    def restartable(self) -> bool:
        """Whether a lost server is to be started again at all."""
        return self._max_restarts > 0

    @property
    def epoch(self) -> int:
        with self._lock:
            return self._epoch

    @property
    def version(self) -> int:
        """The weight version that the servers were last brought back with."""
        with self._lock:
            return self._version

    def check(self) -> None:
        """Raise EngineDied when a server has ended or hangs."""
        self._asked = time.monotonic()
        with self._lock:
            if self._lost is not None:
                raise EngineDied(self._lost)
        try:
            for server in self._servers:
                server.check_alive()
        except EngineDied as error:
            with self._lock:
                self._lost = self._lost or str(error)
            raise

    def report(self, error: BaseException, epoch: int) -> None:
        """A request met a server that is gone; the first such error since ``epoch`` counts."""
        with self._lock:
            if epoch == self._epoch:
                self.resubmitted += 1
                if not self._restarting:
                    self._lost = self._lost or str(error)

    def restart(self) -> None:
        """Stop every server and start it again; returns when all are healthy.

        Raises EngineDied or EngineError, with the cause, once there have been too many restarts or
        when a server does not come up.
        """
        with self._lock:
            cause, self._restarting = self._lost, True
        if self.restarts >= self._max_restarts:
            raise EngineDied(
                f"{cause or 'a server was lost'} (after {self.restarts} restarts,"
                f" max_engine_restarts {self._max_restarts})"
            )
        delay_s = min(self._backoff_s * 2**self.restarts, _MAX_BACKOFF_S)
        self.restarts += 1
        logger.warning(
            "restart %d of %d of the servers in %g s: %s",
            self.restarts,
            self._max_restarts,
            delay_s,
            cause,
        )
        for server in self._servers:
            server.stop()
        time.sleep(delay_s)
        for server in self._servers:
            server.restart()
        for server in self._servers:
            server.wait_ready()
        with self._lock:
            self._lost = None

    def restored(self, version: int) -> None:
        """The servers hold the weights of ``version``: requests that wait are sent again."""
        with self._lock:
            self._epoch += 1
            self._version = version
            self._restarting = False

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._closed.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        sign_of_life = time.monotonic()
        pause_s = min(2.0, self._health_timeout_s / 4)
        while not self._closed.wait(pause_s):
            if time.monotonic() - self._asked > max(_ASKED_S, 2 * pause_s):
                sign_of_life = time.monotonic()  # nobody asks: nothing is known, nothing is wrong
                continue
            if all(s.healthy(timeout_s=self._health_timeout_s) for s in self._servers):
                sign_of_life = time.monotonic()
            silent_s = time.monotonic() - sign_of_life
            if silent_s > self._health_timeout_s:
                addrs = ", ".join(server.addr for server in self._servers)
                with self._lock:
                    self._lost = self._lost or (
                        f"the SGLang server {addrs} hangs: no sign of life for {silent_s:.0f} s"
                        f" (engine_health_timeout_s {self._health_timeout_s:g})"
                    )
                sign_of_life = time.monotonic()


class ResubmittingBackend:
    """A RolloutBackend whose requests outlive their server: sent again once it is back.

    What a request had generated on a lost server is gone with it; what an earlier part of the same
    rollout brought (``resume_from``) is kept.
    """

    def __init__(self, inner: RolloutBackend, supervisor: EngineSupervisor) -> None:
        self._inner = inner
        self._supervisor = supervisor

    async def generate(
        self, *args: Any, weight_version: int | None = None, **kwargs: Any
    ) -> RolloutSample:
        """As the inner one's, but for a server that is gone.

        One that is back may hold newer weights than were asked for: all new tokens are theirs.
        """
        while True:
            epoch = self._supervisor.epoch
            try:
                return await self._inner.generate(*args, weight_version=weight_version, **kwargs)
            except (EngineDied, EngineUnreachable) as error:
                self._supervisor.report(error, epoch)
                while self._supervisor.epoch == epoch:
                    await asyncio.sleep(_POLL_S)
                if weight_version is not None:
                    weight_version = max(weight_version, self._supervisor.version)

    def __getattr__(self, name: str) -> Any:
        """Every other call is the inner one's."""
        return getattr(self._inner, name)

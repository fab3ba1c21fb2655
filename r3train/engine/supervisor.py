"""The supervisor restarts the job's local servers when one dies or hangs.

A restart starts all servers of the job again, with the checkpoint's weights and no request.  The
caller publishes the current weights; then the lost requests are sent again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from r3train.engine.backend import (
    EngineDied,
    EngineUnreachable,
    Request,
    RolloutBackend,
    Segment,
)
from r3train.engine.server import SGLangServer
from r3train.types import Rechecked, RecheckPart

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 60.0
_IDLE_S = 2.0  # ask for health only while somebody waits for the servers
_POLL_S = 0.1


class EngineSupervisor:
    """Watches the servers that this job owns; thread-safe.

    ``check`` raises EngineDied once a server has ended, or has given no sign of life for
    ``health_timeout_s`` while ``check`` was being called.  ``restart`` may be called
    ``max_restarts`` times in the whole run; the k-th waits ``backoff_s * 2**(k-1)`` seconds, at
    most 60.
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
        self._last_check_s = 0.0
        self._lost: str | None = None
        self._epoch = 0  # number of restarts after which the servers served again
        self._version = 0  # weights that were published after the last restart
        self._restarting = False  # until ``restored``: broken requests are expected
        self.restarts = 0
        self.resubmitted = 0  # requests that were sent again
        self.resumed_tokens = 0  # tokens that were sent again, not generated again
        self._probing = threading.Lock()
        self._resting = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-health", daemon=True)
        self._thread.start()

    @property
    def restartable(self) -> bool:
        """True where a lost server is restarted, False where it ends the run."""
        return self._max_restarts > 0

    @property
    def epoch(self) -> int:
        with self._lock:
            return self._epoch

    @property
    def version(self) -> int:
        """The weight version that was published after the last restart."""
        with self._lock:
            return self._version

    def check(self) -> None:
        """Raise EngineDied when a server has ended or hangs."""
        self._last_check_s = time.monotonic()
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

    def report(self, error: BaseException, epoch: int, tokens_again: int = 0) -> None:
        """Report a request that failed because its server is gone.

        epoch: of the servers when the request was sent; the first error of an epoch is its cause.
        tokens_again: tokens of the rollout's earlier segments, which are sent again with the
        request.
        """
        with self._lock:
            if epoch == self._epoch:
                self.resubmitted += 1
                self.resumed_tokens += tokens_again
                if not self._restarting:
                    self._lost = self._lost or str(error)

    def restart(self) -> None:
        """Stop every server and start it again; returns when all are healthy.

        Raises EngineDied or EngineError, with the cause, once there have been too many restarts or
        when a server does not come up.
        """
        self.rest(False)
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
        """Note that the servers hold ``version``; waiting requests are sent again."""
        with self._lock:
            self._epoch += 1
            self._version = version
            self._restarting = False

    def rest(self, resting: bool) -> None:
        """Ask for no health while servers have released memory: ``/health`` would generate with it.

        Waits for a question under way.  A server that ends is noticed all the same.
        """
        with self._probing:
            self._resting = resting

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._closed.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        sign_of_life = time.monotonic()
        pause_s = min(2.0, self._health_timeout_s / 4)
        while not self._closed.wait(pause_s):
            if time.monotonic() - self._last_check_s > max(_IDLE_S, 2 * pause_s):
                sign_of_life = time.monotonic()  # nobody waits: silence is no fault
                continue
            with self._probing:
                if self._resting or all(
                    s.healthy(timeout_s=self._health_timeout_s) for s in self._servers
                ):
                    sign_of_life = time.monotonic()
            silent_s = time.monotonic() - sign_of_life
            if silent_s > self._health_timeout_s:
                addrs = ", ".join(server.addr for server in self._servers)
                with self._lock:
                    self._lost = self._lost or (
                        f"the SGLang server {addrs} hangs: no sign of life for {silent_s:.0f} s"
                        f" (limit {self._health_timeout_s:.4g} s: engine_health_timeout_s, and the time that the"
                        " routes of its requests may take)"
                    )
                sign_of_life = time.monotonic()


class ResubmittingBackend:
    """A RolloutBackend that sends a request again once its lost server is back.

    The tokens that the lost server had generated for the request are lost.  Tokens of earlier
    segments of the same rollout are part of the request and are kept.  ``versions_stay``: restarted
    servers get older versions too, so a request keeps its own.
    """

    def __init__(
        self,
        inner: RolloutBackend,
        supervisor: EngineSupervisor,
        *,
        versions_stay: bool = False,
    ) -> None:
        self._inner = inner
        self._supervisor = supervisor
        self._versions_stay = versions_stay

    async def generate(self, request: Request) -> Segment:
        """Draw tokens; servers may be lost and restarted meanwhile.

        A restarted server may hold newer weights than the request asked for.  The request then asks
        for those, unless ``versions_stay``.
        """
        while True:
            epoch = self._supervisor.epoch
            try:
                return await self._inner.generate(request)
            except (EngineDied, EngineUnreachable) as error:
                self._supervisor.report(error, epoch, request.num_generated)
                while self._supervisor.epoch == epoch:
                    await asyncio.sleep(_POLL_S)
                if request.weight_version is not None and not self._versions_stay:
                    newest = max(request.weight_version, self._supervisor.version)
                    request = replace(request, weight_version=newest)

    def servers(self) -> list[int]:
        """Servers of the inner backend."""
        return self._inner.servers()

    async def recheck(
        self, request: Request, part: RecheckPart, server: int | None = None
    ) -> Rechecked:
        """Compute the request's text again; a lost server's recheck is lost."""
        return await self._inner.recheck(request, part, server)

    async def score_twice(self, request: Request, server: int) -> tuple[Segment, Rechecked]:
        """Sample, then score the result on the same server."""
        return await self._inner.score_twice(request, server)

    async def pause_generation(self, mode: str = "in_place") -> None:
        """Pause the inner backend's servers."""
        await self._inner.pause_generation(mode)

    async def continue_generation(self) -> None:
        """Let the inner backend's servers go on."""
        await self._inner.continue_generation()

    async def abort(self) -> None:
        """Abort all requests of this job."""
        await self._inner.abort()

    async def aclose(self) -> None:
        """Close the inner backend."""
        await self._inner.aclose()

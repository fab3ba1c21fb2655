"""The supervisor sees that one of the job's local servers has died or hangs, and starts them again when it is told to.

Who waits for servers learns it from ``check``; the loop restarts them (``loop.recovery``).  A restart starts all servers of the job again, with the checkpoint's weights and no request.  To the rest of the job the
old ones have left, and the new ones join (``engine.members``): they get the current weights, and then requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from r3train.engine.backend import EngineDied
from r3train.engine.server import SGLangServer

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 60.0
_IDLE_S = 2.0  # ask for health only while somebody waits for the servers


class EngineSupervisor:
    """Watches the servers that this job owns; any thread may call ``check``.

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
        self._last_check_s = 0.0
        self._silent: str | None = None  # says that a server hangs
        self.restarts = 0
        self._probing = threading.Lock()
        self._resting = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-health", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise EngineDied when a server has ended or hangs."""
        self._last_check_s = time.monotonic()
        if (silent := self._silent) is not None:
            raise EngineDied(silent)
        for server in self._servers:
            server.check_alive()

    def restart(self, cause: str) -> None:
        """Stop every server and start it again; returns when all are healthy.

        Raises EngineDied or EngineError, with the cause, once there have been too many restarts or
        when a server does not come up.
        """
        self.rest(False)
        if self.restarts >= self._max_restarts:
            raise EngineDied(
                f"{cause} (after {self.restarts} restarts, max_engine_restarts {self._max_restarts})"
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
        self._silent = None

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
                self._silent = (
                    f"the SGLang server {addrs} hangs: no sign of life for {silent_s:.0f} s"
                    f" (limit {self._health_timeout_s:.4g} s: engine_health_timeout_s, and the time that the"
                    " routes of its requests may take)"
                )
                sign_of_life = time.monotonic()

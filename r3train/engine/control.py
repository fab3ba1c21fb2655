"""The control calls for plain, synchronous code: the training thread's handle on the engines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import numpy as np

from r3train.engine.backend import EngineError
from r3train.engine.server_versions import ServerVersions
from r3train.types import RouteShape
from r3train.engine.control_calls import SGLangControl
from r3train.engine.http import SGLangHTTP
from r3train.routing.wire import decode_routed_experts

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ALIVE_EVERY_S = 0.5


class EngineControl:
    """Synchronous control of all servers, on a loop and a thread of its own.

    Usable from any thread while a producer's loop runs elsewhere.  Calls raise EngineError with
    the server's own message; the two calls that need a simultaneous partner in the trainer
    (joining a group, receiving a broadcast) return a Future.  ``versions`` is kept true: unknown
    from the beginning of an update on, and the new version once every server has confirmed it.
    """

    def __init__(
        self,
        addrs: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        check_alive: Callable[[], None] | None = None,
        routes: RouteShape | None = None,
        versions: ServerVersions | None = None,
    ) -> None:
        self.versions = versions or ServerVersions([None] * len(addrs))
        self._sent_version: int | None = None
        self._http = SGLangHTTP(
            addrs, api_key=api_key, request_timeout_s=timeout_s, check_alive=check_alive
        )
        self._control = SGLangControl(self._http)
        self._check_alive = check_alive
        self._routes = routes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-control", daemon=True
        )
        self._thread.start()

    @property
    def num_servers(self) -> int:
        return len(self._http.urls)

    def _submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result; a server that ends or hangs meanwhile ends the wait."""
        pending = self._submit(call)
        while not wait([pending], timeout=_ALIVE_EVERY_S).done:
            try:
                self.check_alive()
            except EngineError:
                pending.cancel()
                raise
        return pending.result()

    def check_alive(self) -> None:
        """Raise EngineDied when a server process of this job has ended."""
        if self._check_alive is not None:
            self._check_alive()

    def server_info(self) -> list[dict[str, Any]]:
        return self._run(self._control.server_info())

    def model_info(self) -> list[dict[str, Any]]:
        return self._run(self._control.model_info())

    def weight_versions(self) -> list[str]:
        """The version label that each server holds now."""
        return [str(info.get("weight_version")) for info in self.model_info()]

    def update_group_sizes(self) -> list[int]:
        """Ranks that each server brings into a weight-update group: its tensor-parallel size.

        Raises ValueError for a server with pipeline or data parallelism, whose ranks would claim
        the same place in the group.
        """
        sizes = []
        for url, info in zip(self._http.urls, self.server_info(), strict=True):
            for key in ("pp_size", "dp_size"):
                if int(info.get(key) or 1) != 1:
                    raise ValueError(
                        f"engine {url} runs with {key} {info[key]}: distributed weight updates "
                        "need 1; use --update-weight-transfer-mode disk"
                    )
            sizes.append(int(info["tp_size"]))
        return sizes

    def require_routed_experts(self) -> None:
        """Raise ValueError for a server that would answer without routes (external ones may)."""
        for url, info in zip(self._http.urls, self.server_info(), strict=True):
            if not info.get("enable_return_routed_experts"):
                raise ValueError(
                    f"engine {url} was started without --enable-return-routed-experts: "
                    "--use-rollout-routing-replay has nothing to replay"
                )

    def require_exact_boundaries(self) -> None:
        """Raise ValueError for a server whose version labels are off by a token at an update."""
        for url, info in zip(self._http.urls, self.server_info(), strict=True):
            if not info.get("disable_overlap_schedule"):
                raise ValueError(
                    f"engine {url} was started without --disable-overlap-schedule: with weight "
                    "updates in mid-generation the version of the token at the boundary would be "
                    "wrong"
                )

    def pause_generation(self, mode: str = "in_place") -> None:
        self._run(self._control.pause_generation(mode))

    def continue_generation(self) -> None:
        self._run(self._control.continue_generation())

    def flush_cache(self) -> None:
        self._run(self._control.flush_cache())

    def init_weights_update_group(self, **arguments: Any) -> Future[None]:
        """Arguments as ``SGLangControl.init_weights_update_group``; done once all have joined."""
        return self._submit(self._control.init_weights_update_group(**arguments))

    def destroy_weights_update_group(self, group_name: str) -> None:
        self._run(self._control.destroy_weights_update_group(group_name))

    def begin_weight_update(self) -> None:
        self.versions.unknown()
        self._sent_version = None
        self._run(self._control.begin_weight_update())

    def end_weight_update(self) -> None:
        self._run(self._control.end_weight_update())
        if self._sent_version is not None:
            self.confirm_version(self._sent_version)

    def update_weights_from_distributed(
        self, *, weight_version: int | None = None, **arguments: Any
    ) -> Future[None]:
        """Arguments as ``SGLangControl.update_weights_from_distributed``; done once loaded."""
        self._sent_version = weight_version
        return self._submit(
            self._control.update_weights_from_distributed(
                weight_version=weight_version, **arguments
            )
        )

    def update_weights_from_disk(
        self, model_path: str, *, weight_version: int, flush_cache: bool = True
    ) -> None:
        self.versions.unknown()
        self._run(
            self._control.update_weights_from_disk(
                model_path, weight_version=weight_version, flush_cache=flush_cache
            )
        )
        self.confirm_version(weight_version)

    def confirm_version(self, version: int) -> None:
        """Ask every server for its label; those with another one stay out of use.

        Raises EngineError when no server holds ``version``.
        """
        labels = self.weight_versions()
        for server, label in enumerate(labels):
            if label == str(version):
                self.versions.record(version, server)
            else:
                self.versions.unknown(server)
                logger.warning(
                    "engine %s holds weights %s after the update to %d: it is not used",
                    self._http.urls[server],
                    label,
                    version,
                )
        if not self.versions.holders(version):
            raise EngineError(
                f"no engine holds weight version {version} after the update: {labels}"
            )

    def abort_all(self) -> None:
        """Abort every request on every server; their partial answers come back to who asked."""
        self._run(self._control.abort())

    def update_weight_version(self, version: int) -> None:
        self._run(self._control.update_weight_version(version))

    def probe_log_probs(
        self, token_ids: Sequence[int] | np.ndarray, *, server: int = 0
    ) -> np.ndarray:
        """Log-probs of a text under the weights one server holds, at temperature 1.

        Returns float32[T]: entry t is the log-prob of token t after those before it, entry 0 is 0.
        """
        return self._run(self._control.prompt_log_probs(token_ids, server=server))[0]

    def probe_routes(self, token_ids: Sequence[int] | np.ndarray, *, server: int = 0) -> np.ndarray:
        """Routes of a text on one server: uint8 or uint16 [T-1, L, K].

        The rows may come from the prefix cache, as any sample's may.  Raises EngineError when the
        server sends none.
        """
        assert self._routes is not None, "this control was made without the routes' shape"
        _, payload = self._run(
            self._control.prompt_log_probs(token_ids, server=server, routed_experts=True)
        )
        if payload is None:
            raise EngineError(f"probe_routes: {self._http.urls[server]} sent no routed_experts")
        return decode_routed_experts(
            payload, self._routes, num_tokens=len(token_ids), sample="probe"
        )

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def __enter__(self) -> EngineControl:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

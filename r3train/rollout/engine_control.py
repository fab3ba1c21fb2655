"""The control calls for plain, synchronous code: the training thread's handle on the engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from r3train.rollout.backend import EngineError
from r3train.rollout.sglang_answer import ExpectedRoutes
from r3train.rollout.sglang_control import SGLangControl
from r3train.rollout.sglang_http import SGLangHTTP
from r3train.routing.wire import decode_routed_experts

T = TypeVar("T")


class EngineControl:
    """Synchronous control of all servers, on a loop and a thread of its own.

    Usable from any thread while a producer's loop runs elsewhere.  Calls raise EngineError with
    the server's own message; the two calls that need a simultaneous partner in the trainer
    (joining a group, receiving a broadcast) return a Future.
    """

    def __init__(
        self,
        addrs: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        check_alive: Callable[[], None] | None = None,
        routes: ExpectedRoutes | None = None,
    ) -> None:
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
        return self._submit(call).result()

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
        self._run(self._control.begin_weight_update())

    def end_weight_update(self) -> None:
        self._run(self._control.end_weight_update())

    def update_weights_from_distributed(self, **arguments: Any) -> Future[None]:
        """Arguments as ``SGLangControl.update_weights_from_distributed``; done once loaded."""
        return self._submit(self._control.update_weights_from_distributed(**arguments))

    def update_weights_from_disk(self, model_path: str, *, weight_version: int) -> None:
        self._run(self._control.update_weights_from_disk(model_path, weight_version=weight_version))

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
            payload,
            num_tokens=len(token_ids),
            num_layers=self._routes.num_layers,
            topk=self._routes.topk,
            num_experts=self._routes.num_experts,
            sample="probe",
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

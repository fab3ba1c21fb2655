"""SGLang's control calls, each to every server, each answer checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from r3train.engine.backend import EngineError
from r3train.engine.http import SGLangHTTP

PAUSE_MODES = ("in_place", "retract", "abort")


class SGLangControl:
    """Pause, continue, flush, abort, weight updates and questions about the servers.

    Every method raises EngineError with the server's own message when one of them refuses.
    """

    def __init__(self, http: SGLangHTTP) -> None:
        self.http = http

    async def pause_generation(self, mode: str = "in_place") -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r}, expected one of {PAUSE_MODES}")
        await self.http.call_all("/pause_generation", {"mode": mode}, what="pause_generation")

    async def continue_generation(self) -> None:
        await self.http.call_all("/continue_generation", what="continue_generation")

    async def flush_cache(self, wait_s: float = 5.0) -> None:
        """Drop every cached prefix; waits up to ``wait_s`` for a server to become idle."""
        await self.http.call_all(f"/flush_cache?timeout={wait_s:g}", what="flush_cache")

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request wherever it runs, or all when ``rid`` is None."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self.http.call_all("/abort_request", body, what="abort_request")

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offsets: Sequence[int],
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Let every server's ranks join the group, server i from ``rank_offsets[i]`` on."""
        bodies = [
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            }
            for offset in rank_offsets
        ]
        await self.http.call_all(
            "/init_weights_update_group", bodies, what="init_weights_update_group"
        )

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self.http.call_all(
            "/destroy_weights_update_group",
            {"group_name": group_name},
            what="destroy_weights_update_group",
        )

    async def begin_weight_update(self) -> None:
        await self.http.call_all("/begin_weight_update", what="begin_weight_update")

    async def end_weight_update(self) -> None:
        await self.http.call_all("/end_weight_update", what="end_weight_update")

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = "flattened_bucket",
        weight_version: int | None = None,
        flush_cache: bool = True,
    ) -> None:
        """Receive one broadcast; only between begin and end, and the sender must broadcast."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = str(weight_version)
        await self.http.call_all(
            "/update_weights_from_distributed", body, what="update_weights_from_distributed"
        )

    async def update_weights_from_disk(
        self, model_path: str, *, weight_version: int | None = None, flush_cache: bool = True
    ) -> None:
        body: dict[str, Any] = {"model_path": model_path, "flush_cache": flush_cache}
        if weight_version is not None:
            body["weight_version"] = str(weight_version)
        await self.http.call_all("/update_weights_from_disk", body, what="update_weights_from_disk")

    async def update_weight_version(self, version: int) -> None:
        """Relabel the weights that the servers hold; touches no weight and aborts nothing."""
        await self.http.call_all(
            "/update_weight_version",
            {"new_version": str(version), "abort_all_requests": False},
            what="update_weight_version",
        )

    async def server_info(self) -> list[dict[str, Any]]:
        """How each server was started: tp_size, random_seed, enable_return_routed_experts, ..."""
        return await self.http.call_all("/server_info", what="server_info", method="GET")

    async def model_info(self) -> list[dict[str, Any]]:
        """What each server holds now: model_path, weight_version, ..."""
        return await self.http.call_all("/model_info", what="model_info", method="GET")

    async def prompt_log_probs(
        self, token_ids: Sequence[int] | np.ndarray, *, server: int, routed_experts: bool = False
    ) -> tuple[np.ndarray, str | memoryview | None]:
        """One server's log-probs of a given text, at temperature 1, with no token generated.

        Returns float32[T], where entry t is the log-prob of token t after those before it and
        entry 0 is 0, and the routes as they came over the wire.  The prefix cache is not used.
        """
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": routed_experts,
        }
        answer = await self.http.call(server, "/generate", body, what="prompt_log_probs")
        meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
        entries = meta.get("input_token_logprobs") or []
        if [entry[1] for entry in entries] != ids:
            raise EngineError(
                f"prompt_log_probs: {self.http.urls[server]} scored {len(entries)} tokens, "
                f"expected the {len(ids)} that were sent"
            )
        values = np.asarray([0.0] + [entry[0] for entry in entries[1:]], dtype=np.float32)
        return values, meta.get("routed_experts")

"""The async client of SGLang's ``/generate``: token ids in, a checked ``RolloutSample`` out.

It talks to the servers directly.  A router in front of them would drop the routed experts
(sglang-router 0.3.2 does, silently), so the balancing is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from r3train.rollout.backend import EngineError, SamplingParams, sample_seed
from r3train.rollout.server_versions import ServerVersions
from r3train.rollout.sglang_answer import ExpectedRoutes, read_answer
from r3train.rollout.sglang_control import SGLangControl
from r3train.rollout.sglang_http import SGLangHTTP
from r3train.rollout.stitch import rows_known
from r3train.types import Prompt, RolloutSample

_REMEMBERED_GROUPS = 4096
_VERSION_POLL_S = 0.05
_ABORT_S = 3.0


class SGLangClient:
    """Generation over one or more servers (implements ``RolloutBackend``).

    A group's samples go to one server, where its prompt is cached; a new group goes to the least
    loaded one.  Use it from a single event loop; ``control`` holds the calls that reach all
    servers.  ``routes`` None means: do not ask for routed experts.  ``versions`` says what each
    server holds: a request goes to none that misses the weights it asks for.
    ``cache_per_version`` keeps prefixes cached under one version from requests of another, where a
    flush is impossible because requests are running.
    """

    def __init__(
        self,
        addrs: Sequence[str],
        *,
        routes: ExpectedRoutes | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 300.0,
        max_concurrency: int = 64,
        check_alive: Callable[[], None] | None = None,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        versions: ServerVersions | None = None,
        cache_per_version: bool = False,
    ) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency is {max_concurrency}, expected at least 1")
        self.http = SGLangHTTP(
            addrs, api_key=api_key, request_timeout_s=request_timeout_s, check_alive=check_alive
        )
        self.control = SGLangControl(self.http)
        self.routes = routes
        self._detokenize = detokenize
        self._slots = asyncio.Semaphore(max_concurrency)
        self._load = [0] * len(self.http.urls)
        self._server_of_group: OrderedDict[int, int] = OrderedDict()
        self._attempts = itertools.count()
        self._versions = versions
        self._cache_per_version = cache_per_version
        self._aborts: set[asyncio.Task] = set()

    def _server_for(self, group_id: int, allowed: Sequence[int]) -> int:
        """The group's server while it is allowed, else the least loaded of those that are."""
        server = self._server_of_group.get(group_id)
        if server not in allowed:
            server = min(allowed, key=self._load.__getitem__)
            self._server_of_group[group_id] = server
            if len(self._server_of_group) > _REMEMBERED_GROUPS:
                self._server_of_group.popitem(last=False)
        return server

    async def _allowed_servers(self, weight_version: int | None, sample_id: int) -> Sequence[int]:
        """Servers that hold the weights that are asked for; waits while none does."""
        if self._versions is None or weight_version is None:
            return range(len(self.http.urls))
        deadline = time.monotonic() + self.http.request_timeout_s
        while not (holders := self._versions.holders(weight_version)):
            if time.monotonic() > deadline:
                held = dict(zip(self.http.urls, self._versions.all(), strict=True))
                raise EngineError(
                    f"sample {sample_id}: no server holds weight version {weight_version} "
                    f"(None is unknown): {held}"
                )
            await asyncio.sleep(_VERSION_POLL_S)
        return holders

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        sample_id: int,
        group_id: int,
        weight_version: int | None = None,
        exact_version: bool = True,
        resume_from: RolloutSample | None = None,
        turn_limit: int | None = None,
    ) -> RolloutSample:
        """Draw one response, or the rest of one (see ``RolloutBackend.generate``).

        The per-sample seed takes effect on servers started with
        ``--enable-deterministic-inference``; others ignore it.  Log-probs are those of the
        distribution after temperature, before top-p and top-k.  Cancelling the call aborts the
        request on its server.
        """
        prompt_len = len(prompt.token_ids)
        tokens = prompt.token_ids if resume_from is None else resume_from.token_ids
        budget = sampling.response_budget(prompt_len, prompt.prompt_id)
        budget -= len(tokens) - prompt_len
        assert budget > 0, f"sample {sample_id} has no token left to generate"
        if turn_limit is not None:
            budget = min(budget, turn_limit)
        params = {
            "max_new_tokens": budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": sample_seed(sampling.seed, sample_id),
        }
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        body = {
            "rid": f"r3train-{sample_id}-{next(self._attempts)}",
            "input_ids": np.asarray(tokens).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.routes is not None,
        }
        if resume_from is not None and self.routes is not None:
            body["routed_experts_start_len"] = rows_known(resume_from)
        if self._cache_per_version and weight_version is not None:
            body["extra_key"] = f"weights-{weight_version}"
        async with self._slots:
            allowed = await self._allowed_servers(weight_version, sample_id)
            server = self._server_for(group_id, allowed)
            self._load[server] += 1
            try:
                answer = await self.http.call(server, "/generate", body, what=f"sample {sample_id}")
            except asyncio.CancelledError:
                self._abort_later(server, body["rid"])
                raise
            finally:
                self._load[server] -= 1
        return read_answer(
            answer,
            prompt=prompt,
            sample_id=sample_id,
            group_id=group_id,
            max_new_tokens=budget,
            routes=self.routes,
            weight_version=weight_version,
            exact_version=exact_version,
            resume_from=resume_from,
            detokenize=self._detokenize,
        )

    def _abort_later(self, server: int, rid: str) -> None:
        """Tell a server to stop; a closed connection alone would be noticed seconds later."""

        async def abort() -> None:
            with contextlib.suppress(EngineError):
                await self.http.call(
                    server, "/abort_request", {"rid": rid}, what="abort_request", timeout_s=_ABORT_S
                )

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def pause_generation(self, mode: str = "in_place") -> None:
        await self.control.pause_generation(mode)

    async def continue_generation(self) -> None:
        await self.control.continue_generation()

    async def flush_cache(self) -> None:
        await self.control.flush_cache()

    async def abort(self, rid: str | None = None) -> None:
        await self.control.abort(rid)

    async def aclose(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_S)
        await self.http.aclose()

"""The async client of SGLang's ``/generate``: token ids in, a checked ``RolloutSample`` out.

It talks to the servers directly.  A router in front of them would drop the routed experts
(sglang-router 0.3.2 does, silently), so the balancing is done here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from r3train.rollout.backend import SamplingParams, sample_seed
from r3train.rollout.sglang_answer import ExpectedRoutes, read_answer
from r3train.rollout.sglang_control import SGLangControl
from r3train.rollout.sglang_http import SGLangHTTP
from r3train.types import Prompt, RolloutSample

_REMEMBERED_GROUPS = 4096


class SGLangClient:
    """Generation over one or more servers (implements ``RolloutBackend``).

    A group's samples go to one server, where its prompt is cached; a new group goes to the least
    loaded one.  Use it from a single event loop; ``control`` holds the calls that reach all
    servers.  ``routes`` None means: do not ask for routed experts.
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

    def _server_for(self, group_id: int) -> int:
        server = self._server_of_group.get(group_id)
        if server is None:
            server = min(range(len(self._load)), key=self._load.__getitem__)
            self._server_of_group[group_id] = server
            if len(self._server_of_group) > _REMEMBERED_GROUPS:
                self._server_of_group.popitem(last=False)
        return server

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        sample_id: int,
        group_id: int,
        weight_version: int | None = None,
    ) -> RolloutSample:
        """Draw one response (see ``RolloutBackend.generate``).

        The per-sample seed takes effect on servers started with
        ``--enable-deterministic-inference``; others ignore it.  Log-probs are those of the
        distribution after temperature, before top-p and top-k.
        """
        budget = sampling.response_budget(len(prompt.token_ids), prompt.prompt_id)
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
            "input_ids": np.asarray(prompt.token_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.routes is not None,
        }
        async with self._slots:
            server = self._server_for(group_id)
            self._load[server] += 1
            try:
                answer = await self.http.call(server, "/generate", body, what=f"sample {sample_id}")
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
            detokenize=self._detokenize,
        )

    async def pause_generation(self, mode: str = "in_place") -> None:
        await self.control.pause_generation(mode)

    async def continue_generation(self) -> None:
        await self.control.continue_generation()

    async def flush_cache(self) -> None:
        await self.control.flush_cache()

    async def abort(self, rid: str | None = None) -> None:
        await self.control.abort(rid)

    async def aclose(self) -> None:
        await self.http.aclose()

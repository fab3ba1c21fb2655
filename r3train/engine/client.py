"""The async client of SGLang's ``/generate``: token ids in, a checked ``RolloutSample`` out.

It talks to the servers directly.  A router in front of them would drop the routed experts
(sglang-router 0.3.2 does, silently), so the balancing is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from r3train.engine.backend import (
    AnswerCutShort,
    AnswerLate,
    BadAnswer,
    EngineError,
    SamplingParams,
    sample_seed,
)
from r3train.engine.route_relay import RouteRelay
from r3train.engine.server_versions import ServerVersions
from r3train.engine.answer import read_answer, route_wire_bytes, sample_name
from r3train.types import RouteShape
from r3train.engine.control_calls import SGLangControl
from r3train.engine.http import SGLangHTTP
from r3train.generation.stitch import rows_known
from r3train.types import Prompt, RolloutSample

logger = logging.getLogger(__name__)

# what reading an answer raises that is none
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
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
    flush is impossible because requests are running.  With a ``relay`` requests go through the route
    stores, which keep the routes.  A request whose answer was bad is sent again, to another server
    where there is one, until ``max_bad_answers`` have come; ``on_bad_answer`` is told of each.  None
    in ``request_timeout_s`` is a bad answer where ``/health`` answers within ``health_timeout_s``.
    On ``shared_servers`` only requests of this client are ever aborted.
    """

    def __init__(
        self,
        addrs: Sequence[str],
        *,
        routes: RouteShape | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 300.0,
        max_concurrency: int = 64,
        check_alive: Callable[[], None] | None = None,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        versions: ServerVersions | None = None,
        cache_per_version: bool = False,
        relay: RouteRelay | None = None,
        max_bad_answers: int = 1,
        on_bad_answer: Callable[[], None] | None = None,
        shared_servers: bool = False,
        health_timeout_s: float = 60.0,
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
        self._requests = itertools.count()
        # ids of its own: another job may use the same server
        self._name = f"r3train-{secrets.token_hex(4)}"
        self._max_bad_answers = max_bad_answers
        self._on_bad_answer = on_bad_answer or (lambda: None)
        self._shared_servers = shared_servers
        self._health_timeout_s = health_timeout_s
        self._running: dict[str, int] = {}  # request id -> its server
        self._versions = versions
        self._cache_per_version = cache_per_version
        self._relay = relay
        self.route_wire_bytes = 0  # base64 bytes of routes that came here
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

    def _move_group(self, group_id: int, server: int) -> None:
        """Let the group's next request go to another server than this one, where there is one."""
        others = [i for i in range(len(self._load)) if i != server]
        if others and self._server_of_group.get(group_id) == server:
            self._server_of_group[group_id] = min(others, key=self._load.__getitem__)

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
        request on its server, as no answer in time does.  Raises BadAnswer or AnswerCutShort after
        too many of them, and AnswerLate for a server that tells nothing of its health either.
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
            "input_ids": np.asarray(tokens).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.routes is not None,
        }
        if resume_from is not None and self.routes is not None:
            body["routed_experts_start_len"] = rows_known(resume_from)
        if self._cache_per_version and weight_version is not None:
            body["extra_key"] = f"weights-{weight_version}"
        asked: list[int] = []  # servers, in turn
        for count in range(1, self._max_bad_answers + 1):
            try:
                return read_answer(
                    await self._ask(body, prompt, sample_id, group_id, weight_version, asked),
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
            except (*_MALFORMED, AnswerCutShort, AnswerLate) as error:
                if isinstance(error, AnswerLate) and not await self._healthy(asked[-1]):
                    raise  # not this request alone: the server is lost
                self._on_bad_answer()
                text = f"{error} (bad answer {count}, max_bad_answers {self._max_bad_answers})"
                if not str(error).startswith("sample "):
                    text = f"sample {sample_id}: {type(error).__name__}: {text}"
                if count == self._max_bad_answers:
                    cut_short = isinstance(error, AnswerCutShort)
                    raise (AnswerCutShort if cut_short else BadAnswer)(text) from error
                logger.warning("asked again: %s", text)
                self._move_group(group_id, asked[-1])
        raise AssertionError("max_bad_answers is below 1")

    async def _ask(
        self,
        body: dict[str, Any],
        prompt: Prompt,
        sample_id: int,
        group_id: int,
        weight_version: int | None,
        asked: list[int],
    ) -> Any:
        """One request, under an id of its own, to a server that may serve it: the last of ``asked``."""
        async with self._slots:
            allowed = await self._allowed_servers(weight_version, sample_id)
            server = self._server_for(group_id, allowed)
            asked.append(server)
            # a server aborts every id that begins with the one it is told: the end is marked
            body = {**body, "rid": f"{self._name}-{sample_id}-{next(self._requests)}."}
            self._load[server] += 1
            self._running[body["rid"]] = server
            try:
                return await self._send(server, body, prompt, sample_id, group_id)
            except (asyncio.CancelledError, AnswerLate):
                self._abort_later(server, body["rid"])
                raise
            finally:
                self._load[server] -= 1
                del self._running[body["rid"]]

    async def _send(
        self, server: int, body: dict[str, Any], prompt: Prompt, sample_id: int, group_id: int
    ) -> Any:
        """One answer, from the server itself or by way of a route store."""
        what = f"sample {sample_id}"
        if self._relay is None:
            answer = await self.http.call(server, "/generate", body, what=what)
        else:
            name = sample_name(sample_id, prompt)
            answer = await self._relay.generate(
                self.http, server, body, what=what, group_id=group_id, sample=name
            )
        self.route_wire_bytes += route_wire_bytes(answer)
        return answer

    async def _healthy(self, server: int) -> bool:
        try:
            await self.http.call(
                server, "/health", method="GET", what="health", timeout_s=self._health_timeout_s
            )
        except EngineError:
            return False
        return True

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
        if rid is not None or not self._shared_servers:
            return await self.control.abort(rid)
        await asyncio.gather(
            *(
                self.http.call(server, "/abort_request", {"rid": own}, what="abort_request")
                for own, server in list(self._running.items())
            )
        )

    async def aclose(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_S)
        if self._relay is not None:
            await self._relay.aclose()
        await self.http.aclose()

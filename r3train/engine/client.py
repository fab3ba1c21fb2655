"""The async client of SGLang's ``/generate``: token ids in, a checked ``Segment`` out.

It talks to the servers directly.  A router in front of them would drop the routed experts
(sglang-router 0.3.2 does, silently), so the balancing is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from r3train.engine.backend import (
    AnswerLate,
    AnswerRefused,
    BadAnswer,
    EngineError,
    EngineUnreachable,
    Request,
    Segment,
    ServerLeft,
    sample_seed,
)
from r3train.engine.adapters import Adapters, adapter_name
from r3train.engine.answer import Sent, read_answer
from r3train.routing.indexer_topk import num_words
from r3train.routing.wire import decode_routed_experts
from r3train.types import Rechecked, RecheckPart, RouteShape
from r3train.engine.members import Members
from r3train.engine.score import GivenText, rechecked, score
from r3train.engine.sglang_http import (
    ASKED_AGAIN,
    ID_BYTES,
    HTTPSettings,
    SGLangHTTP,
    Tries,
    bound_of_routes,
    bound_of_texts,
)

T = TypeVar("T")

_REMEMBERED_GROUPS = 4096
_VERSION_POLL_S = 0.05
_ABORT_S = 3.0
# bytes in base64 of a word of bits of chosen tokens; of an id within the sampling mask, with its comma
_WORD_BYTES, _KEPT_BYTES = 10.8, 12


class Transport(Protocol):
    """Carries requests to their servers and routes back; one per client, in its event loop."""

    route_wire_bytes: int  # base64 bytes of routes that came here

    async def generate(
        self,
        http: SGLangHTTP,
        server: int,
        body: dict[str, Any],
        request: Request,
        most_bytes: int,
    ) -> Any:
        """Return the answer of ``/generate``; raises the errors of ``SGLangHTTP.call``."""
        ...

    def decode(
        self, payload: str, routes: RouteShape, *, num_tokens: int, start: int, sample: str
    ) -> np.ndarray:
        """Return the rows of an answer: ``routes.dtype`` [num_tokens-1-start, *routes.row]."""
        ...

    async def aclose(self) -> None: ...


class DirectTransport:
    """Sends requests straight to the server, which answers with the routes in base64."""

    def __init__(self) -> None:
        self.route_wire_bytes = 0

    async def generate(
        self,
        http: SGLangHTTP,
        server: int,
        body: dict[str, Any],
        request: Request,
        most_bytes: int,
    ) -> Any:
        """Return the server's answer."""
        what = f"sample {request.sample_id}"
        return await http.call(server, "/generate", body, what=what, most_bytes=most_bytes)

    def decode(self, payload: str, routes: RouteShape, **extent: Any) -> np.ndarray:
        """Decode the routes: see ``decode_routed_experts``."""
        self.route_wire_bytes += len(payload)
        return decode_routed_experts(payload, routes, **extent)

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


@dataclass(eq=False)
class SGLangClient:
    """Generation over one or more servers (implements ``RolloutBackend``), from a single event loop.

    A group's samples go to one server, where its prompt is cached; a new group goes to the least loaded
    one.  Where ``members`` change, a request whose server is lost goes on at another or a new one, with
    the newest weights.  A request never goes to one of ``members`` without the weights that it asks for.
    One whose server is busy or whose answer was bad is sent again as ``Tries`` says, to another server where
    there is one.
    """

    members: Members | Sequence[str]  # or the addresses of servers that stay
    settings: HTTPSettings = HTTPSettings()
    _: KW_ONLY
    # the shape of an answer's rows; None: no routed experts are asked for
    routes: RouteShape | None = None
    # their shape as servers send them, where the transport makes something else of them
    sent_routes: RouteShape | None = None
    # the tokens that an indexer chooses for a row: answers with routes bring its choices too
    index_topk: int | None = None
    # an answer that is late is a bad one if /health answers within this
    health_timeout_s: float = 60.0
    # hides prefixes cached under one version from others, where running requests make a flush impossible
    cache_per_version: bool = False
    # carries requests whose answers hold routes; None: straight to the server
    transport: Transport | None = None
    # other jobs use them, so only requests of this client are ever aborted
    shared_servers: bool = False
    # a request names the adapter of its version, which stays loaded until the answer has come
    adapters: Adapters | None = None
    # bounds the ids of tokens
    vocab_size: int | None = None
    # see Sent; of a server
    ends_at: Callable[[int], range | None] = lambda server: None

    def __post_init__(self) -> None:
        self._knows_versions = isinstance(self.members, Members)
        self.http = SGLangHTTP(
            self.members, self.settings, adapters_alone=self.adapters is not None
        )
        self.members = self.http.members
        self.sent_routes = self.sent_routes or self.routes
        self._direct = DirectTransport()
        self.transport = self.transport or self._direct
        self.moved_requests = self.moved_tokens = 0  # whose server had left
        self._load: defaultdict[int, int] = defaultdict(int)  # by server
        self._server_of_group: OrderedDict[int, int] = OrderedDict()
        self._requests = itertools.count()
        # request ids begin with it: another job may use the same server
        self._name = f"r3train-{secrets.token_hex(4)}"
        self._running: dict[str, int] = {}  # request id -> its server
        self._aborted: set[str] = set()  # those of them that a server was told to abort
        self._aborting = 0  # calls under way that abort everything
        self._aborts: set[asyncio.Task] = set()

    @property
    def route_wire_bytes(self) -> int:
        """Base64 bytes of routes that came here so far."""
        return self.transport.route_wire_bytes

    def _server_for(self, group_id: int, allowed: Sequence[int]) -> int:
        """Return the group's server if it is allowed, else the least loaded of the allowed ones."""
        server = self._server_of_group.get(group_id)
        if server not in allowed:
            server = min(allowed, key=self._load.__getitem__)
            self._server_of_group[group_id] = server
            if len(self._server_of_group) > _REMEMBERED_GROUPS:
                self._server_of_group.popitem(last=False)
        return server

    def _move_group(self, group_id: int, server: int) -> None:
        """Send the group's next request to another server than this one, if there is another."""
        candidates = [i for i in self.members.present() if i != server]
        if candidates and self._server_of_group.get(group_id) == server:
            self._server_of_group[group_id] = min(candidates, key=self._load.__getitem__)

    async def _allowed_servers(self, weight_version: int | None, sample_id: int) -> Sequence[int]:
        """Wait until a server holds the weights that the request asks for; return all that do.

        Any weights of the run do for a request that asks for none; without an update yet, whatever the servers hold.
        """
        if not self._knows_versions or weight_version is None:
            if servers := self.members.ready() or self.members.present():
                return servers
            weight_version = 0
        deadline = time.monotonic() + self.settings.request_timeout_s
        while not (holders := self.members.askable(weight_version)):
            if time.monotonic() > deadline and not self.members.changes:
                versions = dict(zip(self.http.urls, self.members.all(), strict=True))
                raise EngineUnreachable(
                    f"sample {sample_id}: no server holds weight version {weight_version} "
                    f"(None is unknown): {versions}"
                )
            await asyncio.sleep(_VERSION_POLL_S)
        return holders

    async def generate(self, request: Request) -> Segment:
        """Draw tokens (see ``RolloutBackend.generate``).

        The per-sample seed takes effect on servers started with
        ``--enable-deterministic-inference``; others ignore it.  Log-probs are those of the
        distribution after temperature, before top-p and top-k; with ``mask_vocab`` they are those among
        the tokens that both kept.  Cancelling the call aborts the request on its server; so does a
        timeout.  Raises BadAnswer or AnswerCutShort after too many of them, and AnswerLate for a late
        answer of a server whose ``/health`` is silent too.
        """
        with self._adapter_of(request):
            while True:
                try:
                    return await self._answered(request, partial(self._drawn, request))
                except ServerLeft:
                    self.moved_requests += 1
                    self.moved_tokens += request.num_generated

    async def _drawn(self, request: Request, tried: list[int]) -> Segment:
        # with adapters new servers get those of older versions too
        if self.members.changes and self.adapters is None:
            request = await self._for_newest(request)
        answer, sent = await self._ask(self._body(request), request, tried)
        read = partial(
            read_answer,
            routes=self.routes if request.wants_routes else None,
            decode=self.transport.decode,
            index_topk=self.index_topk,
        )
        segment = await self.http.in_reader(read, answer, request, sent)
        return replace(segment, server=tried[-1])

    async def _for_newest(self, request: Request) -> Request:
        """Wait until a server may have the request; return it with the newest weights, which an update has brought meanwhile."""
        if request.weight_version is None:
            return request
        await self._allowed_servers(request.weight_version, request.sample_id)
        return replace(request, weight_version=max(request.weight_version, self.members.newest))

    async def _answered(self, request: Request, ask: Callable[[list[int]], Awaitable[T]]) -> T:
        """Return what ``ask`` reads of the request's first good answer; it appends the server that it asks."""
        tries, tried = Tries(self.http, f"sample {request.sample_id}"), []
        while True:
            try:
                return await ask(tried)
            except (*ASKED_AGAIN, EngineUnreachable) as error:
                changes = self.members.changes
                if isinstance(error, ServerLeft) or not (changes or isinstance(error, ASKED_AGAIN)):
                    raise
                may_be_lost = isinstance(error, EngineUnreachable if changes else AnswerLate)
                if may_be_lost and not await self._healthy(tried[-1]):
                    if not changes:
                        raise  # its /health is silent too: the server is lost
                    self.members.leave(tried[-1], str(error))
                    raise ServerLeft(str(error)) from error
                # an update brings no server back that is well
                is_bad_answer = isinstance(error, (AnswerLate, AnswerRefused)) or (
                    changes and isinstance(error, EngineUnreachable)
                )
                failure = BadAnswer(str(error)) if is_bad_answer else error
                self._move_group(request.group_id, tried[-1])
                await tries.failed(failure, tried[-1])

    def _adapter_of(self, request: Request) -> AbstractContextManager[None]:
        """Keep the request's adapter loaded inside the context; raises EngineError if it is not."""
        if self.adapters is None:
            return contextlib.nullcontext()
        return self.adapters.using(request.weight_version)

    def _adapter_name(self, request: Request) -> str | None:
        return None if self.adapters is None else adapter_name(request.weight_version)

    def _body(self, request: Request) -> dict[str, Any]:
        """Return the JSON of a request, without its id."""
        sampling = request.sampling
        params = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": sample_seed(sampling.seed, request.sample_id),
        }
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        body = {
            "input_ids": np.asarray(request.token_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.routes is not None and request.wants_routes,
        }
        if (adapter := self._adapter_name(request)) is not None:
            body["lora_path"] = adapter
        if body["return_routed_experts"] and self.index_topk is not None:
            body["return_indexer_topk"] = True
        if sampling.mask_vocab is not None:
            body["return_sampling_mask"] = True
        if request.rows_start and self.routes is not None:
            body["routed_experts_start_len"] = request.rows_start
        own_cache = self.cache_per_version or request.fresh_prefix
        if own_cache and request.weight_version is not None:
            # with this client's name: another job's version of that number has other weights
            body["extra_key"] = f"{self._name}-weights-{request.weight_version}"
        return body

    async def _ask(
        self, body: dict[str, Any], request: Request, tried: list[int]
    ) -> tuple[Any, Sent]:
        """Send a request under a new id to an allowed server, which is appended to ``tried``."""
        allowed = await self._allowed_servers(request.weight_version, request.sample_id)
        server = self._server_for(request.group_id, allowed)
        tried.append(server)
        # a server aborts every id that begins with the given one, so an end mark closes the id
        rid = f"{self._name}-{request.sample_id}-{next(self._requests)}."
        self._load[server] += 1
        # an answer without routes needs no transport of routes
        transport = self.transport if request.wants_routes else self._direct
        try:
            return await self._send(server, rid, body, request, transport)
        finally:
            self._load[server] -= 1

    async def _send(
        self, server: int, rid: str, body: dict[str, Any], request: Request, transport: Transport
    ) -> tuple[Any, Sent]:
        """Send a request under this id; returns the answer, and what it must agree with."""
        most = most_answer_bytes(
            request,
            self.sent_routes if body["return_routed_experts"] else None,
            self.index_topk if "return_indexer_topk" in body else None,
        )
        async with self._in_progress(rid, server):
            answer = await transport.generate(
                self.http, server, {**body, "rid": rid}, request, most
            )
            return answer, Sent(
                rid,
                vocab_size=self.vocab_size,
                newest_version=self.members.newest,
                ends_at=self.ends_at(server),
                may_abort=rid in self._aborted,
                names_adapter=self.adapters is not None,
            )

    @contextlib.asynccontextmanager
    async def _in_progress(self, rid: str, server: int) -> AsyncIterator[None]:
        """Know a server's request inside the context, and abort it once nobody waits for its answer."""
        self._running[rid] = server
        if self._aborting:
            self._aborted.add(rid)
        try:
            async with self.http.while_present(server):
                yield
        except (asyncio.CancelledError, AnswerLate, AnswerRefused):
            self._abort_later(server, rid)
            raise
        finally:
            del self._running[rid]
            self._aborted.discard(rid)

    def servers(self) -> list[int]:
        return self.members.ready() if self._knows_versions else self.members.present()

    def is_busy(self, server: int) -> bool:
        """True while a server has requests of this client."""
        return server in self._running.values()

    async def recheck(
        self, request: Request, part: RecheckPart, server: int | None = None
    ) -> Rechecked:
        """Compute a text again, on the group's server if none is given.

        Log-probs from position 0 make the server start without a cached prefix.  A cache key of its own
        keeps all of the request away from the cache: otherwise the later chunks of a long prefill would
        get the rows of the same text from there.
        """
        assert self.sent_routes is not None, "there are no routes to compute again"
        with self._adapter_of(request):
            return await self._answered(
                request, lambda tried: self._recheck(request, part, server, tried)
            )

    async def _recheck(
        self, request: Request, part: RecheckPart, server: int | None, tried: list[int]
    ) -> Rechecked:
        if server is None:
            allowed = await self._allowed_servers(request.weight_version, request.sample_id)
            server = self._server_for(request.group_id, allowed)
        held_version = (
            self.members.all()[server] if self._knows_versions else request.weight_version
        )
        # it was updated or restarted since; an adapter stays next to newer ones
        if held_version != request.weight_version and (
            self.adapters is None or held_version is None
        ):
            raise EngineError(
                f"server {self.http.urls[server]} holds weight version {held_version} (None is unknown),"
                f" and no longer {request.weight_version}"
            )
        tried.append(server)
        rid = f"{self._name}-again-{request.sample_id}-{next(self._requests)}."
        text = GivenText(
            request.token_ids,
            request.name,
            rows_from=request.rows_start,
            cache_key=rid,
            adapter=self._adapter_name(request),
        )
        async with self._in_progress(rid, server):
            try:
                scores = await score(self.http, server, text, rid, routes=self.sent_routes)
            except ValueError as error:
                if rid in self._aborted:  # by this client: not asked again
                    raise EngineError(str(error)) from error
                raise
        names_adapter = self.adapters is not None
        return rechecked(scores, request, part, server, names_adapter=names_adapter)

    async def score_twice(self, request: Request, server: int) -> tuple[Segment, Rechecked]:
        """Sample tokens, then recheck the whole text on the same server."""

        async def ask(tried: list[int]) -> Segment:
            tried.append(server)
            rid = f"{self._name}-noise-{request.sample_id}-{next(self._requests)}."
            answer, sent = await self._send(server, rid, self._body(request), request, self._direct)
            return read_answer(answer, request, sent, routes=self.sent_routes)

        with self._adapter_of(request):
            sampled = await self._answered(request, ask)
        tokens = np.concatenate([request.token_ids, sampled.token_ids])
        again = replace(request, token_ids=tokens, max_new_tokens=0)
        return sampled, await self.recheck(again, "whole", server)

    async def _healthy(self, server: int) -> bool:
        how = {"method": "GET", "what": "health", "timeout_s": self.health_timeout_s}
        try:
            async with self.http.while_present(server):  # one that joins again is another
                await self.http.call(server, "/health", **how)
        except ServerLeft:
            raise
        except EngineError:
            return False
        return True

    def _abort_later(self, server: int, rid: str) -> None:
        """Tell a server to abort a request; it would notice a closed connection seconds later."""

        async def abort() -> None:
            with contextlib.suppress(EngineError):
                await self.http.call(
                    server, "/abort_request", {"rid": rid}, what="abort_request", timeout_s=_ABORT_S
                )

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def pause_generation(self, mode: str = "in_place") -> None:
        await self.http.ask_all("pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self.http.ask_all("continue_generation")

    async def abort(self) -> None:
        self._aborted |= self._running.keys()
        if self.shared_servers:
            await asyncio.gather(
                *(
                    self.http.ask(server, "abort_request", {"rid": running_id})
                    for running_id, server in list(self._running.items())
                )
            )
            return
        self._aborting += 1  # a request that is sent meanwhile may arrive before the call
        try:
            await self.http.ask_all("abort_request", {"abort_all": True})
        finally:
            self._aborting -= 1

    async def aclose(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_S)
        await self.transport.aclose()
        await self.http.aclose()


def most_answer_bytes(
    request: Request, routes: RouteShape | None, index_topk: int | None = None
) -> int:
    """Bytes that an honest answer never has.

    routes: as servers send them, None where none are asked; index_topk: the tokens that an indexer chooses
    for a row, where its choices are asked.
    """
    tokens = len(request.token_ids) + request.max_new_tokens
    num_bytes = bound_of_texts(tokens)
    if routes is not None:
        num_bytes += bound_of_routes(tokens - request.rows_start, routes)
        if index_topk is not None:  # ids of all rows, or bits
            layer_bytes = max(index_topk * ID_BYTES, num_words(tokens) * _WORD_BYTES)
            num_bytes += int(tokens * routes.num_layers * layer_bytes)
    if request.sampling.mask_vocab is not None:
        kept = request.sampling.top_k if request.sampling.top_k > 0 else request.sampling.mask_vocab
        num_bytes += request.max_new_tokens * kept * _KEPT_BYTES
    return num_bytes

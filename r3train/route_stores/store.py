"""A route store: it receives, decodes and keeps a share of the routes.

Every data-parallel leader runs one.  Rank 0 sends its requests through it: the store forwards a
request to the engine, keeps the rows of the answer under the key that rank 0 chose, and returns
the rest with ``"key:number of rows"`` in their place.  Leaders then fetch the rows that their ranks
train from one another.

    POST /generate  {server, api_key, body, key, sample, what, timeout_s}
    POST /rows      [[key, start, stop], ...] -> the raw bytes of those rows, end to end
    POST /reach     {server, api_key, what}: whether the store can talk to an engine

Every request carries the bearer key that rank 0 drew.  Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from r3train.engine.backend import AnswerCutShort, AnswerLate, EngineError, EngineUnreachable
from r3train.engine.answer import ROUTE_PAYLOADS
from r3train.types import RouteShape
from r3train.engine.http import SGLangHTTP
from r3train.routing.wire import decode_routed_experts

# errors of an answer, subclasses first: rank 0 raises the same error again
FAILURES: dict[str, type[Exception]] = {
    "cut_short": AnswerCutShort,
    "late": AnswerLate,
    "unreachable": EngineUnreachable,
    "engine": EngineError,
    "value": ValueError,
}
_CHUNK_BYTES = 1 << 20
# number of remembered keys that were released before their rows came (a cancelled request)
_REMEMBERED_KEYS = 1 << 16


class RouteStoreError(RuntimeError):
    """A route store cannot be reached or lacks rows that it must hold; it ends the run."""


class RouteStore:
    """Decoded rows by key; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, np.ndarray] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()
        self.held_bytes = 0
        self.wire_bytes = 0  # base64 text received so far

    def put(self, key: int, rows: np.ndarray, wire_bytes: int = 0) -> None:
        """Keep rows, uint8/uint16 [R, L, K], unless their key has been released already."""
        rows = np.ascontiguousarray(rows)
        with self._lock:
            self.wire_bytes += wire_bytes
            if self._gone.pop(key, key) is None:
                return
            assert key not in self._held, f"key {key} is taken"
            self._held[key] = rows
            self.held_bytes += rows.nbytes

    def rows(self, key: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a key, a view.  Raises RouteStoreError where they are not held."""
        with self._lock:
            rows = self._held.get(key)
        if rows is None or not 0 <= start <= stop <= len(rows):
            held = "nothing" if rows is None else f"rows 0..{len(rows) - 1}"
            raise RouteStoreError(f"rows {start}..{stop - 1} of key {key} are asked, held: {held}")
        return rows[start:stop]

    def release(self, keys: Sequence[int]) -> None:
        """Free the rows of keys; rows that come later under such a key are not kept."""
        with self._lock:
            for key in keys:
                rows = self._held.pop(key, None)
                if rows is not None:
                    self.held_bytes -= rows.nbytes
                    continue
                self._gone[key] = None
                if len(self._gone) > _REMEMBERED_KEYS:
                    self._gone.popitem(last=False)


class RouteStoreApp:
    """The store's HTTP side; make it and use it in one event loop."""

    def __init__(self, store: RouteStore, token: str, routes: RouteShape) -> None:
        self._store = store
        self._token = f"Bearer {token}".encode()
        self._routes = routes
        self._engines: dict[tuple[str, str | None], SGLangHTTP] = {}

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authorised], client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/rows", self._rows)
        app.router.add_post("/reach", self._reach)
        return app

    async def aclose(self) -> None:
        for http in self._engines.values():
            await http.aclose()

    @web.middleware
    async def _authorised(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._token):
            return web.Response(status=401, text="route store: no or another bearer key")
        return await handler(request)

    def _engine(self, ask: dict[str, Any]) -> SGLangHTTP:
        place = ask["server"], ask["api_key"]
        if place not in self._engines:
            self._engines[place] = SGLangHTTP([ask["server"]], api_key=ask["api_key"])
        return self._engines[place]

    async def _generate(self, request: web.Request) -> web.Response:
        ask = orjson.loads(await request.read())
        return await _outcome(self._answer(ask))

    async def _answer(self, ask: dict[str, Any]) -> Any:
        answer = await self._engine(ask).call(
            0, "/generate", ask["body"], what=ask["what"], timeout_s=ask["timeout_s"]
        )
        # a malformed answer is passed on unchanged: rank 0 refuses it, and says why
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        payload = meta.get("routed_experts") if isinstance(meta, dict) else None
        output_ids = answer.get("output_ids") if isinstance(answer, dict) else None
        if not isinstance(payload, ROUTE_PAYLOADS):
            return answer
        del meta["routed_experts"]
        if isinstance(output_ids, list) and output_ids:
            rows = await asyncio.to_thread(
                decode_routed_experts,
                payload,
                self._routes,
                num_tokens=len(ask["body"]["input_ids"]) + len(output_ids),
                start=ask["body"].get("routed_experts_start_len", 0),
                sample=ask["sample"],
            )
            self._store.put(ask["key"], rows, len(payload))
            meta["routed_experts"] = f"{ask['key']}:{len(rows)}"
        return answer

    async def _reach(self, request: web.Request) -> web.Response:
        ask = orjson.loads(await request.read())
        call = self._engine(ask).call(0, "/model_info", method="GET", what=ask["what"])
        return await _outcome(call)

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        parts = orjson.loads(await request.read())
        try:
            found = [self._store.rows(*part) for part in parts]
        except RouteStoreError as error:
            return web.Response(status=404, text=str(error))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = sum(rows.nbytes for rows in found)
        await response.prepare(request)
        for rows in found:
            raw = memoryview(rows.reshape(-1).view(np.uint8))
            for at in range(0, len(raw), _CHUNK_BYTES):
                await response.write(raw[at : at + _CHUNK_BYTES])
        await response.write_eof()
        return response


async def _outcome(call: Awaitable[Any]) -> web.Response:
    """Reply with the answer of a call, or with its error, which rank 0 raises again."""
    try:
        reply = {"answer": await call}
    except tuple(FAILURES.values()) as error:
        kind = next(name for name, of in FAILURES.items() if isinstance(error, of))
        reply = {"error": kind, "message": str(error)}
    return web.Response(body=orjson.dumps(reply), content_type="application/json")

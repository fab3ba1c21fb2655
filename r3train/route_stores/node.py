"""A data-parallel leader's route store at work: its server, and rows fetched from any store.

Rank 0 sends its requests through a store, which forwards them to the engine, keeps the rows of the answer
under the key that rank 0 chose, and returns the rest with ``"key:number of rows"`` in their place.  Leaders
then fetch the rows that their ranks train from one another.

    POST /generate  {server, api_key, body, key, sample, what, timeout_s, most_bytes}
    POST /rows      [[key, start, stop], ...] -> the raw bytes of those rows, end to end
    POST /reach     {server, api_key, what}: whether the store can talk to an engine

Every request carries the bearer key that rank 0 drew.  Nothing is pickled.  One thread with one event loop
serves and fetches, so that routes arrive while the actor trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from r3train.engine.answer import ROUTE_PAYLOADS
from r3train.engine.backend import EngineBusy
from r3train.engine.sglang_http import HTTPSettings, SGLangHTTP
from r3train.engine.loop_thread import LoopThread
from r3train.route_stores.relay import open_session, store_failed
from r3train.route_stores.store import FAILURES, RouteStore, RouteStoreError
from r3train.route_stores.handles import runs
from r3train.routing.wire import decode_routed_experts
from r3train.types import RouteShape

T = TypeVar("T")

# (key, first row, row after the last), and the array to fill: uint8/uint16 [rows, L, K]
_Wanted = tuple[tuple[int, int, int], np.ndarray]

_START_S = 30.0
_NO_PROGRESS_S = 120.0
_CHUNK_BYTES = 1 << 20


class RouteNode:
    """Serves this rank's store, and fetches rows from any; its methods are thread-safe."""

    def __init__(self, index: int, token: str, routes: RouteShape, host: str) -> None:
        self.index = index
        self.store = RouteStore()
        self.fetched_bytes = 0  # from other stores
        self._token = token
        self._routes = routes
        self._host = host
        self._urls: list[str] = []
        self._started: Future[int] = Future()
        self._stop: asyncio.Event | None = None
        self._session: aiohttp.ClientSession | None = None
        self._engines: dict[tuple[str, str | None], SGLangHTTP] = {}
        self._thread = LoopThread("route-store", self._failed)

    def start(self) -> int:
        """Bind and serve; returns the port.  Raises OSError where the host cannot be bound."""
        self._thread.start(self._serve)
        return self._started.result(timeout=_START_S)

    def connect(self, urls: Sequence[str]) -> None:
        """Set the addresses of all stores, in the order of their indices."""
        self._urls = list(urls)

    def reach(self) -> list[str]:
        """Ask every other store for no rows; return the failures of stores that do not answer."""
        return self.submit(self._ask_other_stores).result()

    async def _ask_other_stores(self) -> list[str]:
        stores = [store for store in range(len(self._urls)) if store != self.index]
        calls = (self._fetch_from(store, []) for store in stores)
        failures = [f for f in await asyncio.gather(*calls, return_exceptions=True) if f]
        for failure in failures:
            if not isinstance(failure, RouteStoreError):
                raise failure
        return [str(failure) for failure in failures]

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._authorised], client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/rows", self._rows)
        app.router.add_post("/reach", self._reach)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, 0)
            await site.start()
            self._session = open_session(self._token)
            self._started.set_result(runner.addresses[0][1])
            await self._stop.wait()
        finally:
            if self._session is not None:
                await self._session.close()
            for http in self._engines.values():
                await http.aclose()
            await runner.cleanup()

    @web.middleware
    async def _authorised(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.Response(status=401, text="route store: no or another bearer key")
        return await handler(request)

    def _engine(self, ask: dict[str, Any]) -> SGLangHTTP:
        place = ask["server"], ask["api_key"]
        if place not in self._engines:
            self._engines[place] = SGLangHTTP([ask["server"]], HTTPSettings(api_key=ask["api_key"]))
        return self._engines[place]

    async def _generate(self, request: web.Request) -> web.Response:
        ask = msgspec.json.decode(await request.read())
        return await _outcome(self._answer(ask))

    async def _answer(self, ask: dict[str, Any]) -> Any:
        answer = await self._engine(ask).call(
            0,
            "/generate",
            ask["body"],
            what=ask["what"],
            timeout_s=ask["timeout_s"],
            most_bytes=ask["most_bytes"],
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
            self.store.put(ask["key"], rows, len(payload))
            meta["routed_experts"] = f"{ask['key']}:{len(rows)}"
        return answer

    async def _reach(self, request: web.Request) -> web.Response:
        ask = msgspec.json.decode(await request.read())
        call = self._engine(ask).call(0, "/model_info", method="GET", what=ask["what"])
        return await _outcome(call)

    async def _rows(self, request: web.Request) -> web.StreamResponse:
        parts = msgspec.json.decode(await request.read())
        try:
            found = [self.store.rows(*part) for part in parts]
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

    def _failed(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)

    def submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine in the store's loop."""
        return asyncio.run_coroutine_threadsafe(call(), self._thread.loop)

    def fetch(self, handles: np.ndarray) -> tuple[np.ndarray, Future[None]]:
        """Begin to fetch the rows of handles, uint64[R, 1, 1], from all stores at once.

        Returns uint8/uint16 [R, L, K] and a future.  The array is whole once the future is done;
        the future raises the failure of a store.  Missing rows hold the marker.
        """
        out = np.empty((len(handles), *self._routes.row), dtype=self._routes.dtype)
        wanted: dict[int, list[_Wanted]] = defaultdict(list)
        for first, key, start, stop in runs(handles):
            place = out[first : first + stop - start]
            if key is None:
                place[:] = self._routes.missing
            else:
                wanted[key % len(self._urls)].append(((key, start, stop), place))
        return out, self.submit(lambda: self._fetch(wanted))

    async def _fetch(self, wanted_by_store: Mapping[int, Sequence[_Wanted]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for store, wanted in wanted_by_store.items():
                    if store == self.index:
                        tasks.create_task(asyncio.to_thread(self._copy_local, wanted))
                    else:
                        tasks.create_task(self._fetch_from(store, wanted))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _copy_local(self, wanted: Sequence[_Wanted]) -> None:
        for part, place in wanted:
            place[:] = self.store.rows(*part)

    async def _fetch_from(self, store: int, wanted: Sequence[_Wanted]) -> None:
        url = self._urls[store]
        body = msgspec.json.encode([part for part, _ in wanted])
        expected = sum(place.nbytes for _, place in wanted)
        try:
            async with self._session.post(
                f"{url}/rows",
                data=body,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=10.0, sock_read=_NO_PROGRESS_S
                ),
            ) as response:
                if response.status != 200:
                    raise store_failed(store, url, f"{response.status}: {await response.text()}")
                if response.content_length != expected:
                    got = response.content_length
                    raise store_failed(store, url, f"{got} bytes of rows, expected {expected}")
                await _read_into(response.content, [place for _, place in wanted])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise store_failed(store, url, error) from error
        self.fetched_bytes += expected

    def close(self) -> None:
        """End the server and its thread. Idempotent."""
        if self._stop is not None:
            self._thread.soon(self._stop.set)
            self._thread.join(timeout_s=10)


async def _read_into(stream: aiohttp.StreamReader, places: Sequence[np.ndarray]) -> None:
    """Read a body into the places, one after the other; it has exactly their bytes."""
    left = [memoryview(place.reshape(-1).view(np.uint8)) for place in places if place.nbytes]
    left.reverse()
    with contextlib.suppress(aiohttp.EofStream):
        async for chunk in stream.iter_any():
            view = memoryview(chunk)
            while len(view):
                place = left.pop()
                count = min(len(view), len(place))
                place[:count] = view[:count]
                view = view[count:]
                if count < len(place):
                    left.append(place[count:])
    if left:
        raise RouteStoreError("the rows of a route store ended early")


async def _outcome(call: Awaitable[Any]) -> web.Response:
    """Reply with the answer of a call, or with its error, which rank 0 raises again."""
    try:
        reply = {"answer": await call}
    except tuple(FAILURES.values()) as error:
        kind = next(
            name for name, error_class in FAILURES.items() if isinstance(error, error_class)
        )
        reply = {"error": kind, "message": str(error)}
        if isinstance(error, EngineBusy):
            reply["retry_after_s"] = error.retry_after_s
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

"""Rank 0's side of the route stores: requests sent through them, and keys that are given back.

Rank 0 chooses the key of every answer's routes and holds it in a ``StoredRows``.  When nothing on
rank 0 refers to that any more (the sample was trained, dropped, refused or cancelled), the key
goes onto a list, which travels with the next request or the next step's plan to its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson

from r3train.engine.backend import EngineError
from r3train.engine.route_store import FAILURES, RouteStoreError
from r3train.types import RouteShape
from r3train.engine.http import SGLangHTTP
from r3train.types import RouteRef, RouteSegment, StoredRows

# The store answers when the engine has, or has had its time; then this long is left for the store.
_STORE_S = 60.0


class RouteLedger:
    """Keys in use on every store; thread-safe, as every call is one operation on a deque."""

    def __init__(
        self,
        num_stores: int,
        read: Callable[[int, int, int, int], np.ndarray],
        routes: RouteShape,
    ) -> None:
        self.num_stores = num_stores
        self._read = read
        self._row_shape = routes.row
        self._dtype = routes.dtype
        self._keys = itertools.count()
        self._released: list[deque[int]] = [deque() for _ in range(num_stores)]

    def new(self, store: int) -> StoredRows:
        """A key that nobody has used."""
        return StoredRows(store, next(self._keys), self._read, self._released[store].append)

    def whole(self, rows: StoredRows, count: int) -> RouteRef:
        """All ``count`` rows that are kept under one key."""
        segments = (RouteSegment(rows, 0, count),) if count else ()
        return RouteRef(segments, self._row_shape, self._dtype)

    def take_released(self, store: int) -> list[int]:
        """Keys of a store that may go; whoever takes them tells the store."""
        keys: list[int] = []
        with contextlib.suppress(IndexError):  # empty; another thread may take from it too
            while True:
                keys.append(self._released[store].popleft())
        return keys

    def put_back(self, store: int, keys: Sequence[int]) -> None:
        """Keys that were taken and perhaps not told."""
        self._released[store].extend(keys)


class RouteRelay:
    """Sends requests through the stores; use it from a single event loop.

    A group's requests go to one store, group after group to the next.
    """

    def __init__(self, urls: Sequence[str], token: str, ledger: RouteLedger) -> None:
        self._urls = list(urls)
        self._token = token
        self._ledger = ledger
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        http: SGLangHTTP,
        server: int,
        body: Mapping[str, Any],
        *,
        what: str,
        group_id: int,
        sample: str,
    ) -> Any:
        """An answer of ``/generate``, its routes a ``RouteRef`` to where they are kept.

        ``what`` begins the message of a failed call, ``sample`` names the routes that do not decode.
        Raises what ``SGLangHTTP.call`` and the routes' decoding raise, in the same words, and
        RouteStoreError when the store itself fails.
        """
        store = group_id % len(self._urls)
        rows = self._ledger.new(store)
        released = self._ledger.take_released(store)
        ask = {
            "server": http.urls[server],
            "api_key": http.api_key,
            "body": body,
            "key": rows.key,
            "sample": sample,
            "what": what,
            "timeout_s": http.request_timeout_s,
            "release": released,
        }
        try:
            told = await self._post(store, "/generate", ask, http.request_timeout_s + _STORE_S)
        except BaseException:
            self._ledger.put_back(store, released)
            rows.release()
            raise
        if told.get("error") in ("cut_short", "unreachable"):
            await http.raise_if_dead()
        answer = _answer(told)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        kept = meta.get("routed_experts") if isinstance(meta, dict) else None
        if isinstance(kept, dict):
            meta["routed_experts"] = self._ledger.whole(rows, kept["rows"])
        return answer

    async def require_reach(self, http: SGLangHTTP) -> None:
        """Raise ValueError naming a store that cannot talk to a server, and why."""

        async def one(store: int, server: str) -> None:
            what = f"route store {store} (rank at {self._urls[store]})"
            ask = {"server": server, "api_key": http.api_key, "what": what}
            try:
                _answer(await self._post(store, "/reach", ask, http.request_timeout_s))
            except EngineError as error:
                raise ValueError(
                    f"{error}; --route-stores needs servers that every data-parallel leader can"
                    " reach (sglang.host of servers of our own)"
                ) from error

        pairs = itertools.product(range(len(self._urls)), http.urls)
        await asyncio.gather(*(one(store, server) for store, server in pairs))

    async def _post(self, store: int, path: str, ask: Any, timeout_s: float) -> dict[str, Any]:
        if self._session is None:
            self._session = open_session(self._token)
        try:
            async with self._session.post(
                self._urls[store] + path,
                data=orjson.dumps(ask, option=orjson.OPT_SERIALIZE_NUMPY),
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise store_failed(store, self._urls[store], error) from error
        if response.status != 200:
            text = raw.decode(errors="replace")[:500]
            raise store_failed(store, self._urls[store], f"{response.status}: {text}")
        return orjson.loads(raw)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def open_session(token: str) -> aiohttp.ClientSession:
    """A client of route stores, in the running event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": f"Bearer {token}"},
        read_bufsize=1 << 20,
        trust_env=False,
    )


def store_failed(store: int, url: str, why: object) -> RouteStoreError:
    """The failure of a store itself, which is not an engine's."""
    words = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else why
    return RouteStoreError(f"route store {store} (the leader's at {url}) failed: {words}")


def _answer(told: Mapping[str, Any]) -> Any:
    if "error" in told:
        raise FAILURES[told["error"]](told["message"])
    return told["answer"]

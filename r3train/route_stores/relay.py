"""Rank 0's side of the route stores: requests sent through them, and the keys of their rows.

Rank 0 chooses the key of every answer's rows, and holds handles in the place of the rows.  Keys are
released group by group.  Once a group is trained or dropped, rank 0 sends its keys to their stores
with the plan of the rollout after the next.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from r3train.engine.backend import EngineBusy, EngineError, Request
from r3train.engine.sglang_http import SGLangHTTP
from r3train.route_stores import handles
from r3train.route_stores.store import FAILURES, RouteStoreError
from r3train.types import RouteShape

# The store answers after the engine, or after its timeout; it has this much longer.
_STORE_S = 60.0


class Keys:
    """Keys in use, by group; the store of key k is k modulo the number of stores. Thread-safe."""

    def __init__(self, num_stores: int) -> None:
        self.num_stores = num_stores
        self._lock = threading.Lock()
        self._turns = itertools.count(1)
        self._keys_by_group: defaultdict[int, list[int]] = defaultdict(list)
        self._ended: list[int] = []  # of groups that ended since the last rollout
        self._ended_before: list[int] = []

    def new(self, group_id: int, store: int) -> int:
        """Make a new key for rows that ``store`` will keep for a group."""
        with self._lock:
            key = next(self._turns) * self.num_stores + store
            self._keys_by_group[group_id].append(key)
        return key

    def ended(self, group_id: int) -> None:
        """Mark a group's keys to be released."""
        with self._lock:
            self._ended += self._keys_by_group.pop(group_id, ())

    def take_released(self) -> list[list[int]]:
        """Return, for each store, the keys of groups that ended before the last call.

        Call it once per rollout: the rows of the rollout in training are still needed, for its
        evidence and for a dump.
        """
        with self._lock:
            released, self._ended_before, self._ended = self._ended_before, self._ended, []
        return [
            [key for key in released if key % self.num_stores == store]
            for store in range(self.num_stores)
        ]


class RouteRelay:
    """A ``Transport`` that sends the client's requests through the stores; for one event loop.

    A group's requests go to one store, group after group to the next.
    """

    route_wire_bytes = 0  # routes never reach rank 0's client

    def __init__(self, urls: Sequence[str], token: str, keys: Keys) -> None:
        self._urls = list(urls)
        self._token = token
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        http: SGLangHTTP,
        server: int,
        body: dict[str, Any],
        request: Request,
        most_bytes: int,
    ) -> Any:
        """Return the answer of ``/generate`` with ``"key:number of rows"`` in place of the rows.

        Raises the errors of ``SGLangHTTP.call`` and of decoding routes, in the same words, and
        RouteStoreError when the store itself fails.
        """
        store = request.group_id % len(self._urls)
        ask = {
            "server": http.urls[server],
            "api_key": http.settings.api_key,
            "body": body,
            "key": self._keys.new(request.group_id, store),
            "sample": request.name,
            "what": f"sample {request.sample_id}",
            "timeout_s": http.settings.request_timeout_s,
            "most_bytes": most_bytes,
        }
        reply = await self._post(
            store, "/generate", ask, http.settings.request_timeout_s + _STORE_S
        )
        if reply.get("error") in ("cut_short", "unreachable"):
            await http.raise_if_dead()
        return _answer(reply)

    def decode(
        self, payload: str, routes: RouteShape, *, num_tokens: int, start: int, sample: str
    ) -> np.ndarray:
        """Return the handles of an answer's rows: uint64[num_tokens-1-start, 1, 1]."""
        key, count = map(int, payload.split(":"))
        assert count == num_tokens - 1 - start, f"sample {sample}: {count} rows are kept"
        return handles.issue(key, count)

    async def require_reach(self, http: SGLangHTTP) -> None:
        """Raise ValueError naming a store that cannot talk to a server, and why."""

        async def one(store: int, server: str) -> None:
            what = f"route store {store} (rank at {self._urls[store]})"
            ask = {"server": server, "api_key": http.settings.api_key, "what": what}
            try:
                _answer(await self._post(store, "/reach", ask, http.settings.request_timeout_s))
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
                data=msgspec.json.encode(ask),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise store_failed(store, self._urls[store], error) from error
        if response.status != 200:
            text = raw.decode(errors="replace")[:500]
            raise store_failed(store, self._urls[store], f"{response.status}: {text}")
        return msgspec.json.decode(raw)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def open_session(token: str) -> aiohttp.ClientSession:
    """Open an HTTP session to the route stores, in the running event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": f"Bearer {token}"},
        read_bufsize=1 << 20,
        trust_env=False,
    )


def store_failed(store: int, url: str, why: object) -> RouteStoreError:
    """Make the error for a failure of a store itself, not of an engine."""
    words = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else why
    return RouteStoreError(f"route store {store} (the leader's at {url}) failed: {words}")


def _answer(reply: Mapping[str, Any]) -> Any:
    if "error" in reply:
        error = FAILURES[reply["error"]](reply["message"])
        if isinstance(error, EngineBusy):
            error.retry_after_s = reply["retry_after_s"]
        raise error
    return reply["answer"]

"""A proxy before a real server that spoils some of its answers, or holds some requests back.

It counts ``/generate`` requests from 0; ``spoil`` and ``delay_s`` say what becomes of each.  All
else goes through untouched.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from tests.http_serving import serving
from tests.wire_encoding import sent_ids, text_of

FAR_EXPERT = 1_000_000
TOPK = 2  # of the demo's model


def fewer_routes(answer: dict[str, Any]) -> None:
    """The last four bytes of the routes are missing."""
    meta = answer["meta_info"]
    meta["routed_experts"] = text_of(sent_ids(meta["routed_experts"])[:-1])


def far_expert(answer: dict[str, Any]) -> None:
    """One expert id is past the range."""
    meta = answer["meta_info"]
    ids = sent_ids(meta["routed_experts"])
    ids[len(ids) // 2] = FAR_EXPERT
    meta["routed_experts"] = text_of(ids)


def repeated_expert(answer: dict[str, Any]) -> None:
    """One layer's row is all zeros, as of a server that did not record it."""
    meta = answer["meta_info"]
    ids = sent_ids(meta["routed_experts"])
    ids[:TOPK] = 0
    meta["routed_experts"] = text_of(ids)


def fewer_log_probs(answer: dict[str, Any]) -> None:
    """The last log-prob is missing."""
    answer["meta_info"]["output_token_logprobs"].pop()


def another_token(answer: dict[str, Any]) -> None:
    """A token that the log-probs are not of."""
    answer["output_ids"][0] += 1


def no_version(answer: dict[str, Any]) -> None:
    """Nothing says which weights generated it."""
    del answer["meta_info"]["weight_versions"]


# "cut" is a body that ends before its Content-Length says; "half" is half of it, as the whole
ANSWER_SPOILERS: dict[str, Callable[[dict[str, Any]], None]] = {
    f.__name__: f
    for f in (
        fewer_routes,
        far_expert,
        repeated_expert,
        fewer_log_probs,
        another_token,
        no_version,
    )
}
SPOILERS = ("cut", "half", *ANSWER_SPOILERS)


@dataclass
class Meddling:
    """Orders to a proxy and its record.

    ``spoil(n)`` names the spoiler of answer n or None; ``delay_s(n)`` is the wait before it.

    ``told`` holds (time, request id, spoiler or None) of every answer to ``/generate``.
    """

    spoil: Callable[[int], str | None] = lambda n: None
    delay_s: Callable[[int], float] = lambda n: 0.0
    told: list[tuple[float, str, str | None]] = field(default_factory=list)
    count: int = 0

    def spoiled(self) -> list[str]:
        """The spoilers used, in order."""
        return [spoiler for _, _, spoiler in self.told if spoiler is not None]

    def samples_told(self, until: float = float("inf")) -> set[int]:
        """Ids of the samples whose answer went through untouched by then."""
        return {int(rid.split("-")[2]) for at, rid, how in self.told if how is None and at < until}


class _Proxy:
    """One proxy; use it from its own event loop."""

    def __init__(self, upstream: str, meddling: Meddling, session: aiohttp.ClientSession):
        self._upstream = upstream
        self._meddling = meddling
        self._session = session

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body, meddling = await request.read(), self._meddling
        rid, number = self._name(request.path, body), None
        if rid is not None:
            number, meddling.count = meddling.count, meddling.count + 1
            await asyncio.sleep(meddling.delay_s(number))
        url = f"http://{self._upstream}{request.path_qs}"
        headers = {"Content-Type": "application/json"} if body else {}
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            raw, status, kind = await answer.read(), answer.status, answer.content_type
        if number is None or status != 200:
            return web.Response(body=raw, status=status, content_type=kind)
        spoiler = meddling.spoil(number)
        meddling.told.append((time.monotonic(), rid, spoiler))
        if spoiler == "cut":
            return await self._cut(request, raw)
        if spoiler == "half":
            raw = raw[: len(raw) // 2]
        elif spoiler is not None:
            parsed = json.loads(raw)
            ANSWER_SPOILERS[spoiler](parsed)
            raw = json.dumps(parsed).encode()
        return web.Response(body=raw, content_type=kind)

    def _name(self, path: str, body: bytes) -> str | None:
        """The id of a rollout's request; the probe of the weights has none."""
        rid = json.loads(body).get("rid") if path == "/generate" else None
        # texts that are rechecked (--r3-recheck-share) pass untouched and uncounted
        return rid if rid is not None and rid.split("-")[2].isdigit() else None

    async def _cut(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(raw)
        await response.prepare(request)
        await response.write(raw[: len(raw) // 2])
        request.transport.close()
        return response


@contextmanager
def meddling_proxy(upstream: str, meddling: Meddling) -> Iterator[str]:
    """The address of a proxy before ``upstream`` (host:port), on a thread of its own."""
    loop = asyncio.new_event_loop()
    ready, stop, addrs = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:
            async with serving(_Proxy(upstream, meddling, session).forward) as addr:
                addrs.append(addr)
                ready.set()
                await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10), "the proxy did not start"
    try:
        yield addrs[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        loop.close()

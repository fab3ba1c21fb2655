"""A proxy before a real server that tells lies about some answers, or holds some requests back.

It counts the rollouts' ``/generate`` requests from 0 and remembers what the server said; ``lie(n)`` names what
becomes of answer n, None for the truth.  ``LIES`` are to be refused, of ``HARMLESS`` the truth can be read.  There is
one of each way that an answer goes; the values that a reader refuses are told by tests/unit/engine/test_lies.py.
A swap that finds no other answer is told of a later one.
Probes and control calls have lies of their own: ``lie_to(call)`` names one of ``CALL_LIES``.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
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
Answer = dict[str, Any]
Lie = Callable[[Answer], None]  # changes the answer

LIES: dict[str, Lie] = {}
# lies that are told below JSON: of the bytes, the status or the headers
RAW: dict[str, Callable[[bytes, Answer], web.Response]] = {}


def lie(change: Lie) -> Lie:
    """Register a lie about an answer as parsed."""
    LIES[change.__name__] = change
    return change


def raw(make: Callable[[bytes, Answer], web.Response]) -> Callable[[bytes, Answer], web.Response]:
    """Register a lie about an answer's bytes."""
    RAW[make.__name__] = make
    return make


def _routes(answer: Answer) -> np.ndarray:
    return sent_ids(answer["meta_info"]["routed_experts"])


def _put_routes(answer: Answer, ids: np.ndarray) -> None:
    answer["meta_info"]["routed_experts"] = text_of(ids)


@lie
def log_prob_above_0(answer: Answer) -> None:
    """A number that is no log-prob."""
    answer["meta_info"]["output_token_logprobs"][0][0] = 3


@lie
def meta_no_weight_versions(answer: Answer) -> None:
    """A field less."""
    del answer["meta_info"]["weight_versions"]


@lie
def another_token(answer: Answer) -> None:
    """A token that the log-probs are not of."""
    answer["output_ids"][0] += 1


@lie
def fewer_log_probs(answer: Answer) -> None:
    """The last log-prob is missing."""
    answer["meta_info"]["output_token_logprobs"].pop()


@lie
def abort_in_queue(answer: Answer) -> None:
    """As SGLang answers a request that is aborted in its queue."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    answer["output_ids"] = []
    answer["meta_info"] = {"id": answer["meta_info"]["id"], "finish_reason": reason}


@lie
def version_of_the_future(answer: Answer) -> None:
    """Weights that no server has."""
    span = answer["meta_info"]["weight_versions"][0]
    span["version"] = str(int(span["version"]) + 1)


@lie
def routes_far(answer: Answer) -> None:
    """An expert that no layer has."""
    ids = _routes(answer)
    ids[-1] = FAR_EXPERT
    _put_routes(answer, ids)


@lie
def routes_twice(answer: Answer) -> None:
    """An expert twice."""
    ids = _routes(answer)
    ids[1] = ids[0]
    _put_routes(answer, ids)


@lie
def routes_cut(answer: Answer) -> None:
    """A slot less."""
    _put_routes(answer, _routes(answer)[:-1])


@raw
def half(body: bytes, _answer: Answer) -> web.Response:
    """Half of the bytes, as the whole."""
    return web.Response(body=body[: len(body) // 2])


@raw
def a_bomb(_body: bytes, _answer: Answer) -> web.Response:
    """64 MB in 64 KB."""
    return web.Response(body=gzip.compress(b" " * (1 << 26)), headers={"Content-Encoding": "gzip"})


@raw
def endless(body: bytes, _answer: Answer) -> web.Response:
    """The truth, and 8 MB of spaces after it."""
    return web.Response(body=body + b" " * (8 << 20))


for status in (429, 502, 503, 504):
    RAW[f"busy_{status}"] = lambda body, answer, status=status: web.Response(
        status=status, text="busy", headers={"Retry-After": "0"}
    )

# seconds before a lie is told
AFTER_S: dict[str, float] = {}
# told by the proxy itself: another request's answer, and a body that ends before its Content-Length says
EVERY_LIE = (*LIES, *RAW, "duplicate", "swap", "cut")
# one of each kind of damage that a network or a server does
DAMAGES = (
    "cut",
    "half",
    "routes_cut",
    "routes_far",
    "routes_twice",
    "fewer_log_probs",
    "another_token",
    "meta_no_weight_versions",
)


def _keys_twice(answer: Answer) -> bytes:
    return b'{"output_ids": [3], "meta_info": null, ' + json.dumps(answer).encode()[1:]


# the truth can be read in these
HARMLESS: dict[str, Callable[[Answer], web.Response]] = {
    "keys_twice": lambda answer: web.Response(body=_keys_twice(answer)),
    "wrong_type": lambda answer: web.Response(
        body=json.dumps(answer).encode(), content_type="image/png"
    ),
    "status_201": lambda answer: web.json_response(answer, status=201),
    "in_spaces": lambda answer: web.Response(body=b" \n" + json.dumps(answer).encode() + b"\n "),
}
SLOW = "slow"
LATE_S = 12.0
# of probes and control calls: broken before the server hears of them, or after it has heeded them
CALL_LIES = (
    "busy_429",
    "busy_502",
    "busy_503",
    "busy_504",
    "reset",
    "reset_after",
    "cut",
    "late",
    "null",
    "half",
)
ABORTS = ("abort", "abort_429", "abort_503", "abort_500", "abort_999")  # of probes


@dataclass(frozen=True)
class Told:
    """One answer: when it was told, the request, what the server said, and the kind of lie or None."""

    at: float
    asked: dict[str, Any]
    truth: Answer
    kind: str | None

    @property
    def sample(self) -> int:
        """The id of the sample that was asked for."""
        return int(self.asked["rid"].split("-")[2])


@dataclass
class Record:
    """Orders to a liar, and its record.  ``delay_s(n)`` is the wait before request n, ``hold_s`` that of what it asks."""

    lie: Callable[[int], str | None] = lambda n: None
    delay_s: Callable[[int], float] = lambda n: 0.0
    hold_s: Callable[[dict[str, Any]], float] = lambda asked: 0.0
    lie_to: Callable[[str], str | None] = lambda call: None
    called: list[tuple[str, str]] = field(default_factory=list)  # (call, lie)
    told: list[Told] = field(default_factory=list)
    count: int = 0

    def kinds(self) -> set[str]:
        """The kinds that were told."""
        return {told.kind for told in self.told if told.kind is not None}

    def lies(self) -> list[Told]:
        """Answers that had to be refused, in order."""
        return [told for told in self.told if told.kind in EVERY_LIE]

    def truths(self) -> dict[int, Told]:
        """By sample: the answer in which the truth could be read; each sample has one at most."""
        found: dict[int, Told] = {}
        for told in self.told:
            if told.kind not in EVERY_LIE:
                sample = told.sample
                assert sample not in found, f"sample {sample} was asked for again after a truth"
                found[sample] = told
        return found


class _Liar:
    def __init__(self, upstream: str, record: Record, session: aiohttp.ClientSession) -> None:
        self._upstream, self._record, self._session = upstream, record, session
        self._owed: list[str] = []  # lies that an answer did not allow
        self._last: Answer | None = None
        # an answer that waits for another to be swapped with
        self._waiting: tuple[asyncio.Future[Answer], Answer] | None = None

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body, record, number = await request.read(), self._record, None
        asked = json.loads(body) if request.path == "/generate" else {}
        rid = asked.get("rid") or ""
        # texts that are rechecked are uncounted, and so are probes
        kind_of_call, lie_told = request.path.removeprefix("/"), None
        if rid.count("-") >= 3 and rid.split("-")[2].isdigit():
            number, record.count = record.count, record.count + 1
            await asyncio.sleep(record.delay_s(number) + record.hold_s(asked))
        else:
            if rid:
                kind_of_call = "canary" if rid.startswith("r3train-probe") else "recheck"
            lie_told = record.lie_to(kind_of_call)
        if lie_told is not None:
            record.called.append((kind_of_call, lie_told))
        if lie_told == "reset":
            request.transport.abort()
            return web.Response()
        if lie_told in ("busy_429", "busy_503"):
            return RAW[lie_told](b"", {})
        url = f"http://{self._upstream}{request.path_qs}"
        headers = {"Content-Type": "application/json"} if body else {}
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            said, status, kind = await answer.read(), answer.status, answer.content_type
        if lie_told is not None:
            return await self._tell_of_call(request, lie_told, said, status, kind)
        if number is None or status != 200:
            return web.Response(body=said, status=status, content_type=kind)
        return await self._tell(request, asked, json.loads(said), record.lie(number))

    async def _tell_of_call(
        self, request: web.Request, kind: str, said: bytes, status: int, content_type: str
    ) -> web.StreamResponse:
        """A lie about a call that the server has heeded."""
        if kind in RAW:
            return RAW[kind](said, {})
        if kind == "reset_after":
            request.transport.abort()
        if kind == "cut":
            return await self._in_parts(request, said, cut=True)
        if kind == "late":
            await asyncio.sleep(LATE_S)
        if kind == "null":
            said = b"null"
        if kind in ABORTS:
            answer, (_, _, code) = json.loads(said), kind.partition("_")
            reason = {"type": "abort", "message": "full"}
            answer["meta_info"]["finish_reason"] = reason | (
                {"status_code": int(code)} if code else {}
            )
            said = json.dumps(answer).encode()
        return web.Response(body=said, status=status, content_type=content_type)

    async def _tell(
        self, request: web.Request, asked: dict[str, Any], truth: Answer, kind: str | None
    ) -> web.StreamResponse:
        before, self._last = self._last, truth
        answer = None
        if kind is not None:
            self._owed.append(kind)
            kind, answer = await self._first_owed(before, truth)
        answer = truth if answer is None else answer
        self._record.told.append(Told(time.monotonic(), asked, truth, kind))
        raw_answer = json.dumps(answer).encode()
        if kind in RAW:
            # behind the true answers that came before it, which are read in threads
            await asyncio.sleep(AFTER_S.get(kind, 0))
            return RAW[kind](raw_answer, answer)
        if kind in HARMLESS:
            return HARMLESS[kind](answer)
        if kind in (SLOW, "cut"):
            return await self._in_parts(request, raw_answer, cut=kind == "cut")
        return web.Response(body=raw_answer, content_type="application/json")

    async def _first_owed(
        self, before: Answer | None, truth: Answer
    ) -> tuple[str | None, Answer | None]:
        """The first owed lie that this answer allows, and the answer with it."""
        for _ in range(len(self._owed)):
            if not self._owed:  # others told them, while this one waited to be swapped
                break
            kind, answer = self._owed.pop(0), copy.deepcopy(truth)
            if kind == "duplicate":
                answer = before
            elif kind == "swap":
                answer = await self._swapped(truth)
            elif kind in LIES:
                LIES[kind](answer)
            if answer is not None:
                return kind, answer
            self._owed.append(kind)
        return None, None

    async def _swapped(self, truth: Answer) -> Answer | None:
        """The answer of another request that is to be swapped too; None if none comes."""
        if self._waiting is not None:
            (theirs, answer), self._waiting = self._waiting, None
            theirs.set_result(truth)
            return answer
        mine = asyncio.get_running_loop().create_future()
        self._waiting = mine, truth
        await asyncio.wait({mine}, timeout=2.0)
        if mine.done():
            return mine.result()
        self._waiting = None
        return None

    async def _in_parts(self, request: web.Request, body: bytes, cut: bool) -> web.StreamResponse:
        """The body in five parts, of which the connection carries two if it is to be cut."""
        response = web.StreamResponse()
        response.content_length, size = len(body), 1 + len(body) // 5
        await response.prepare(request)
        for first in range(0, 2 * size if cut else len(body), size):
            await response.write(body[first : first + size])
            await asyncio.sleep(0.0 if cut else 0.1)
        if cut:
            request.transport.close()
        return response


@contextmanager
def lying_proxy(upstream: str, record: Record) -> Iterator[str]:
    """The address of a proxy before ``upstream`` (host:port), on a thread of its own."""
    loop = asyncio.new_event_loop()
    ready, stop, addrs = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:
            async with serving(_Liar(upstream, record, session).forward) as addr:
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

"""Answers of a running server in the situations that it may get wrong, each seen to have happened.

A prefix-cache hit, a prefill in chunks and an abort are asked for, and what the server says of them
is read: a situation that did not come about proves nothing, so it is a finding and not a pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.doctor.finding import Finding, fact, problem
from r3train.engine.backend import EngineError, SamplingParams
from r3train.engine.answer import read_answer
from r3train.types import RouteShape
from r3train.engine.control_calls import SGLangControl
from r3train.engine.http import SGLangHTTP
from r3train.generation import stitch
from r3train.types import Prompt, RolloutSample

SUBJECT = "SGLang probe"
_ANSWER = 8
_ABORTED = 2000
_ABORT_TRIES = 8
_FIRST_DELAY_S = 0.1
_ABORT_EVERY_S = 0.2
# spelled out: a checkpoint's own defaults would change the log-probs
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
Answer = tuple[RolloutSample, dict[str, Any]]  # with its meta_info
_PINS = "compare versions with r3train doctor: 0.5.23 was measured"


@dataclass(frozen=True)
class Drawn:
    """An answer, and the tokens at which the server began anew: after its cache, a chunk, a prompt."""

    sample: RolloutSample
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Situations:
    """Answers by the situation that they were drawn in, and what did not happen or went wrong."""

    drawn: dict[str, Drawn]
    findings: list[Finding]


async def draw_situations(
    addr: str,
    routes: RouteShape | None,
    texts: tuple[np.ndarray, np.ndarray],
    *,
    context: int,
    api_key: str | None = None,
    request_timeout_s: float = 300.0,
) -> Situations:
    """Ask one server for a fresh prompt, one in chunks, one that is cached, one that is aborted.

    texts: a short and a long one, int32[T]; nothing of them may be in the server's cache yet.
    context: tokens that the model can hold.
    """
    async with _asker(addr, routes, api_key, request_timeout_s) as asker:
        short, long = texts
        out = Situations({}, [])
        server = await _server_info(asker, out)
        chunk = server.get("chunked_prefill_size")

        async def draw(what: str, answer: Awaitable[Answer]) -> dict[str, Any] | None:
            return await _try(out, what, chunk, answer)

        await draw("a fresh prompt", asker.ask(short, _ANSWER))
        chunks = f"a prompt of {len(long)} tokens in chunks"
        meta = await draw(chunks, asker.ask(long, _ANSWER))
        if meta is not None:
            out.findings.extend(_chunked(chunk, len(long), meta))
        meta = await draw("after a prefix-cache hit", asker.ask(long, _ANSWER))
        if meta is not None:
            out.findings.extend(_cached(server.get("disable_radix_cache"), len(long), meta))
        half = long[: len(long) // 2]
        await draw("an aborted answer", asker.abort(half, context - len(half) - 1))
        await draw("after an abort", asker.ask(np.concatenate([half, short]), _ANSWER))
        return out


class NotAborted(Exception):
    """Requests ended, but none by the abort and with a token."""


class _Asker:
    """``/generate`` on one server, read as strictly as a rollout is, with what it says beside it."""

    def __init__(self, http: SGLangHTTP, routes: RouteShape | None):
        self.control = SGLangControl(http)
        self._http, self._routes = http, routes

    async def ask(self, ids: np.ndarray, tokens: int, rid: str | None = None) -> Answer:
        """An answer of that many tokens.  Raises ValueError for an answer that is not one."""
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {**_SAMPLING, "max_new_tokens": tokens},
            "return_logprob": True,
            "return_routed_experts": self._routes is not None,
            **({"rid": rid} if rid else {}),
        }
        answer = await self._http.call(0, "/generate", body, what=SUBJECT)
        prompt = Prompt(prompt_id="probe", index=0, text="", token_ids=ids, label=None)
        before = stitch.begin(prompt, sample_id=0, group_id=0)
        request = stitch.next_request(before, SamplingParams(tokens))
        segment = read_answer(answer, request, routes=self._routes)
        return stitch.extend(before, segment), answer["meta_info"]

    async def abort(self, ids: np.ndarray, room: int) -> Answer:
        """An answer that was cut short in generation: at least one token, ended by the abort.

        When a server begins and how fast it is are not known: a request that was aborted before its
        first token is tried again with a later abort, one that was finished first with an earlier.
        Raises NotAborted.
        """
        delay_s, ended = _FIRST_DELAY_S, []
        for attempt in range(_ABORT_TRIES):
            rid = f"r3train-doctor-{attempt}."
            request = asyncio.ensure_future(self.ask(ids, min(_ABORTED, room), rid))
            try:
                await asyncio.wait({request}, timeout=delay_s)
                while not request.done():
                    await self.control.abort(rid)
                    await asyncio.wait({request}, timeout=_ABORT_EVERY_S)
                sample, meta = request.result()
            finally:
                request.cancel()
            tokens = sample.num_tokens - sample.prompt_len
            if sample.finish_reason == "abort" and tokens:
                return sample, meta
            ended.append(f"{sample.finish_reason!r} after {tokens} tokens")
            delay_s *= 2 if sample.finish_reason == "abort" else 0.4
        raise NotAborted(f"{_ABORT_TRIES} requests ended otherwise: {', '.join(ended)}")


@asynccontextmanager
async def _asker(
    addr: str, routes: RouteShape | None, api_key: str | None, timeout_s: float
) -> AsyncIterator[_Asker]:
    http = SGLangHTTP([addr], api_key=api_key, request_timeout_s=timeout_s)
    try:
        yield _Asker(http, routes)
    finally:
        await http.aclose()


async def _server_info(asker: _Asker, out: Situations) -> dict[str, Any]:
    """How the server runs; empty with a finding where it does not say."""
    try:
        (info,) = await asker.control.server_info()
        if isinstance(info, dict):
            return info
        told = f"it answers {str(info)[:80]!r}"
    except EngineError as error:
        told = str(error)
    out.findings.append(problem(SUBJECT, f"/server_info does not say how it runs: {told}", _PINS))
    return {}


async def _try(
    out: Situations, what: str, chunk: Any, answer: Awaitable[Answer]
) -> dict[str, Any] | None:
    """Keep an answer under its situation, or say what went wrong; returns its meta_info or None."""
    try:
        sample, meta = await answer
    except NotAborted as error:
        text = f"{what}: no request could be aborted while it generated: {error}"
        remedy = f"look for /abort_request in the server's log; {_PINS}"
        out.findings.append(problem(SUBJECT, text, remedy))
        return None
    except (EngineError, *_MALFORMED) as error:
        text = f"{what}: {type(error).__name__}: {str(error)[:300]}"
        out.findings.append(problem(SUBJECT, text, _PINS))
        return None
    out.drawn[what] = Drawn(sample, _edges(sample.prompt_len, chunk, meta))
    return meta


def _from_cache(meta: dict[str, Any]) -> int:
    cached = meta.get("cached_tokens")
    return cached if type(cached) is int else 0


def _edges(prompt_len: int, chunk: Any, meta: dict[str, Any]) -> tuple[int, ...]:
    """Where a chunk of prefill began, the first one behind the cache, and where the answer did."""
    cached = _from_cache(meta)
    step = chunk if type(chunk) is int and chunk > 0 else prompt_len
    return (*range(cached, prompt_len, step), prompt_len)


def _chunked(chunk: Any, prompt_len: int, meta: dict[str, Any]) -> list[Finding]:
    """Nothing where the prompt must have been prefilled in more than one chunk."""
    computed = prompt_len - _from_cache(meta)
    if type(chunk) is int and 0 < chunk < computed:
        return []
    text = (
        f"a prefill in chunks did not happen: {computed} of {prompt_len} tokens were computed, and the "
        f"server runs with chunked_prefill_size {chunk}"
    )
    return [problem(SUBJECT, text, "leave --sglang-chunked-prefill-size to the probe, or look why")]


def _cached(cache_off: Any, prompt_len: int, meta: dict[str, Any]) -> list[Finding]:
    """Nothing where the server says that a part of the prompt came from its cache."""
    cached = meta.get("cached_tokens")
    if type(cached) is int and cached > 0:
        return []
    if cache_off is True:
        return [fact(SUBJECT, "the server runs without a prefix cache: there is no hit to probe")]
    text = (
        f"a prefix-cache hit did not happen: cached_tokens is {cached!r} for {prompt_len} tokens "
        "that were asked for before"
    )
    return [problem(SUBJECT, text, f"look for what switched the prefix cache off; {_PINS}")]

"""Answers of a running server in the situations that it may get wrong, each seen to have happened.

The probe asks for a prefix-cache hit, a prefill in chunks and an abort, and reads from the answers
whether they came about: a situation that did not happen proves nothing, so it is a finding.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.doctor.finding import Finding, Findings, fact, problem
from r3train.engine.answer import Sent, read_answer
from r3train.engine.backend import EngineError, Request, SamplingParams, Segment
from r3train.engine.sglang_http import SGLangHTTP
from r3train.types import RouteShape

SUBJECT = "SGLang probe"
_ANSWER = 8
_ABORTED = 2000
_ABORT_TRIES = 8
_FIRST_DELAY_S = 0.1
_ABORT_EVERY_S = 0.2
# spelled out: a checkpoint's own defaults would change the log-probs
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
_PINS = "compare versions with r3train doctor: 0.5.23 was measured"
Answer = tuple[Segment, dict[str, Any]]  # with its meta_info
# ask(input_ids, new_tokens, request id or None)
Ask = Callable[[np.ndarray, int, str | None], Awaitable[Answer]]


@dataclass(frozen=True)
class Sampled:
    """A prompt of P tokens and its answer of A, T in all.

    edges: tokens at which the server began anew: after its cache, at a chunk, at the answer.
    """

    token_ids: np.ndarray  # int32[T]
    prompt_len: int
    log_probs: np.ndarray  # float32[A]
    routes: np.ndarray | None  # uint8/uint16 [T-1, L, K]; None for a dense model
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Situations:
    """Answers by situation, and findings about situations that did not happen or went wrong."""

    sampled: dict[str, Sampled]
    findings: list[Finding]


async def draw_situations(
    addr: str,
    routes: RouteShape | None,
    texts: tuple[np.ndarray, np.ndarray],
    *,
    context: int,
    api_key: str | None = None,
) -> Situations:
    """Ask one server for a fresh prompt, one in chunks, one that is cached, one that is aborted.

    texts: a short and a long one, int32[T]; nothing of them may be in the server's cache yet.
    context: tokens that the model can hold.  Raises EngineError for a server that does not say how
    it runs.
    """
    short, long = texts
    half = long[: len(long) // 2]
    out = Situations({}, [])
    http = SGLangHTTP([addr], api_key=api_key)

    async def ask(ids: np.ndarray, tokens: int = _ANSWER, rid: str | None = None) -> Answer:
        return await _ask(http, routes, ids, tokens, rid)

    situations: dict[str, tuple[np.ndarray, Callable[[np.ndarray], Awaitable[Answer]]]] = {
        "a fresh prompt": (short, ask),
        f"a prompt of {len(long)} tokens in chunks": (long, ask),
        "after a prefix-cache hit": (long, ask),
        "an aborted answer": (half, lambda ids: _abort(http, ask, ids, context - len(ids) - 1)),
        "after an abort": (np.concatenate([half, short]), ask),
    }
    try:
        (server,) = await http.call_all("/server_info", what="server_info", method="GET")
        for what, (prompt, draw) in situations.items():
            try:
                answer, meta = await draw(prompt)
            except (EngineError, ValueError) as error:
                text = f"{what}: {type(error).__name__}: {str(error)[:300]}"
                out.findings.append(problem(SUBJECT, text, _PINS))
            else:
                out.sampled[what] = Sampled(
                    np.concatenate([prompt, answer.token_ids]),
                    len(prompt),
                    answer.log_probs,
                    answer.rows,
                    _edges(len(prompt), server, meta),
                )
                out.findings.extend(_did_not_happen(what, len(prompt), server, meta))
    finally:
        await http.aclose()
    return out


async def _ask(
    http: SGLangHTTP, routes: RouteShape | None, ids: np.ndarray, tokens: int, rid: str | None
) -> Answer:
    """An answer of ``tokens`` tokens, read as strictly as a rollout's.

    Raises EngineError, and ValueError for an answer that contradicts the request.
    """
    body = {
        "input_ids": ids.tolist(),
        "sampling_params": {**_SAMPLING, "max_new_tokens": tokens},
        "return_logprob": True,
        "return_routed_experts": routes is not None,
        "rid": rid or f"r3train-doctor-{secrets.token_hex(4)}.",
    }
    answer = await http.call(0, "/generate", body, what=SUBJECT)
    request = Request(0, 0, "probe", ids, tokens, SamplingParams(tokens, ignore_eos=True))
    sent = Sent(body["rid"], may_abort=rid is not None)
    return read_answer(answer, request, sent, routes=routes), answer["meta_info"]


async def _abort(http: SGLangHTTP, ask: Ask, ids: np.ndarray, most_tokens: int) -> Answer:
    """An answer that was cut short in generation: at least one token, ended by the abort.

    The server's speed is not known: a request that was aborted before its first token is tried again
    with a later abort, one that was finished first with an earlier.  Raises EngineError.
    """
    delay_s, ended = _FIRST_DELAY_S, []
    for attempt in range(_ABORT_TRIES):
        rid = f"r3train-doctor-{attempt}."
        request = asyncio.ensure_future(ask(ids, min(_ABORTED, most_tokens), rid))
        try:
            await asyncio.wait({request}, timeout=delay_s)
            while not request.done():
                await http.call_all("/abort_request", {"rid": rid}, what="abort_request")
                await asyncio.wait({request}, timeout=_ABORT_EVERY_S)
            answer, meta = request.result()
        finally:
            request.cancel()
        if answer.finish_reason == "abort" and len(answer.token_ids):
            return answer, meta
        ended.append(f"{answer.finish_reason!r} after {len(answer.token_ids)} tokens")
        delay_s *= 2 if answer.finish_reason == "abort" else 0.4
    raise EngineError(
        "no request could be aborted while it generated, look for /abort_request in the server's "
        f"log: {', '.join(ended)}"
    )


def _count(value: Any) -> int:
    """A number above 0 as a server tells it, else 0."""
    return value if type(value) is int and value > 0 else 0


def _edges(prompt_len: int, server: dict[str, Any], meta: dict[str, Any]) -> tuple[int, ...]:
    """Tokens at which a chunk of prefill began, the first after the cache, and the answer's."""
    step = _count(server.get("chunked_prefill_size")) or prompt_len
    return (*range(_count(meta.get("cached_tokens")), prompt_len, step), prompt_len)


def _did_not_happen(
    what: str, prompt_len: int, server: dict[str, Any], meta: dict[str, Any]
) -> Findings:
    """A finding where the prompt was not prefilled in chunks, or did not come from the cache."""
    cached, chunk = meta.get("cached_tokens"), server.get("chunked_prefill_size")
    computed = prompt_len - _count(cached)
    if what.endswith("in chunks") and not 0 < _count(chunk) < computed:
        text = (
            f"a prefill in chunks did not happen: {computed} of {prompt_len} tokens were computed, "
            f"and the server runs with chunked_prefill_size {chunk}"
        )
        remedy = "leave --sglang-chunked-prefill-size to the probe, or look why"
        yield problem(SUBJECT, text, remedy)
    if what.endswith("cache hit") and not _count(cached):
        if server.get("disable_radix_cache") is True:
            yield fact(SUBJECT, "the server runs without a prefix cache: there is no hit to probe")
            return
        text = (
            f"a prefix-cache hit did not happen: cached_tokens is {cached!r} for {prompt_len} tokens "
            "that were asked for before"
        )
        yield problem(SUBJECT, text, f"look for what switched the prefix cache off; {_PINS}")

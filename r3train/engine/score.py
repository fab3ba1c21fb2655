"""Score a given text on a server: the one request behind rechecks, canaries and served teachers.

A text is computed in one prefill; with ``new_tokens`` the server goes on and draws so many greedily.

>>> text = GivenText(np.array([5, 6, 7], np.int32), "3 (prompt 'p')", cache_key="mine.")
>>> body = text.body("r.")
>>> body["input_ids"], body["logprob_start_len"], body["extra_key"]
([5, 6, 7], 0, 'mine.')
>>> meta = {
...     "id": "r.", "finish_reason": {"type": "length", "length": 0}, "weight_version": "4",
...     "prompt_tokens": 3, "completion_tokens": 0, "cached_tokens": 0,
...     "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-1.5, 7, None]],
... }
>>> read_scores({"meta_info": meta}, text, "r.").log_probs.tolist()
[0.0, -0.5, -1.5]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.engine.answer import (
    check_base,
    expect_counts,
    finish_kind,
    input_log_probs,
    meta_of,
    output_log_probs,
    output_token_ids,
    routed_rows,
    strict,
    version_number,
)
from r3train.engine.backend import Request
from r3train.engine.sglang_http import SGLangHTTP, bound_of_routes, bound_of_texts
from r3train.types import Rechecked, RecheckPart, RouteShape, Scores


@dataclass(frozen=True, slots=True)
class GivenText:
    """A text of T tokens to be scored, after which a server may draw more.

    A prefix comes from the server's cache up to token ``log_probs_from``; from 0 on SGLang computes everything.
    Later chunks of a long prefill take what an equal text has cached all the same, so a text that must not be
    compared with itself has a ``cache_key`` of its own.
    """

    token_ids: np.ndarray  # int32[T]
    name: str  # of its sample in messages
    log_probs_from: int = 0  # the first token with a log-prob
    rows_from: int | None = None  # the first row of routes; None: none are asked for
    cache_key: str | None = None  # None: the cache of all other requests
    adapter: str | None = None
    new_tokens: int = 0  # to be drawn greedily, an end-of-text token among them or not

    def body(self, rid: str) -> dict[str, Any]:
        """Return the JSON of the request under this id."""
        params: dict[str, Any] = {"max_new_tokens": self.new_tokens, "temperature": 1.0}
        if self.new_tokens:
            params |= {"temperature": 0.0, "ignore_eos": True}
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": np.asarray(self.token_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": self.log_probs_from,
        }
        if self.rows_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.rows_from}
        if self.cache_key is not None:
            body["extra_key"] = self.cache_key
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        return body

    def most_bytes(self, routes: RouteShape | None) -> int:
        """Return the bytes that an honest answer never has; routes: as in ``score``."""
        tokens = len(self.token_ids) + self.new_tokens
        if self.rows_from is None:
            return bound_of_texts(tokens)
        return bound_of_texts(tokens) + bound_of_routes(tokens - self.rows_from, routes)


async def score(
    http: SGLangHTTP, server: int, text: GivenText, rid: str, *, routes: RouteShape | None = None
) -> Scores:
    """Let a server score a text, by a request of this id.

    routes: the shape of rows as servers send them; a text with ``rows_from`` needs it.
    Raises ValueError naming the text for an answer that does not fit it, EngineBusy for one that was aborted with
    a status that says to ask later, and the errors of ``SGLangHTTP.call``.
    """
    what, most_bytes = f"sample {text.name}", text.most_bytes(routes)
    answer = await http.call(server, "/generate", text.body(rid), what=what, most_bytes=most_bytes)
    return read_scores(answer, text, rid, routes=routes)


@strict
def read_scores(
    answer: Any, text: GivenText, rid: str, *, routes: RouteShape | None = None
) -> Scores:
    """Validate and convert the answer to a text; raises the errors of reading in ``score``."""
    name, new_tokens, sampled = text.name, text.new_tokens, np.zeros(0, np.int32)
    meta = meta_of(answer, rid, name)
    reason = meta.get("finish_reason")
    if (kind := finish_kind(reason, name)) == "abort":
        raise ValueError(f"sample {name}: aborted")
    if kind != "length" or reason.get("length") != new_tokens:
        got = repr(reason)[:100]
        raise ValueError(f"sample {name}: finish_reason is {got}, expected length {new_tokens}")
    given = len(text.token_ids)
    expect_counts(meta, name, prompt_tokens=given, completion_tokens=new_tokens)
    cached = meta.get("cached_tokens")
    if type(cached) is not int or not 0 <= cached < given:
        got = repr(cached)[:100]
        raise ValueError(f"sample {name}: cached_tokens is {got}, expected 0..{given - 1}")
    log_probs = input_log_probs(meta, text.token_ids[text.log_probs_from :], name)
    if new_tokens:
        sampled = output_token_ids(answer.get("output_ids"), name)
        if len(sampled) != new_tokens:
            raise ValueError(f"sample {name}: {len(sampled)} output_ids, expected {new_tokens}")
        drawn = output_log_probs(meta.get("output_token_logprobs"), sampled, name)
        log_probs = np.concatenate([log_probs, drawn])
    rows = np.zeros((given + new_tokens - 1, 0, 0), dtype=np.uint8)
    if text.rows_from is not None:
        payload, num_tokens = meta.get("routed_experts"), given + new_tokens
        rows = routed_rows(payload, routes, num_tokens, text.rows_from, name)
    return Scores(log_probs, rows, cached, sampled, meta.get("weight_version"))


def rechecked(
    scores: Scores, request: Request, part: RecheckPart, server: int, *, serves_adapter: bool
) -> Rechecked:
    """Make of a request's scores, with rows from ``rows_start`` on, what its samples are compared with.

    serves_adapter: see ``read_answer``.
    Raises ValueError naming the sample for tokens from the prefix cache, which the comparison would hold against
    themselves, and for a version that is no number.
    """
    if scores.cached_tokens:
        raise ValueError(
            f"sample {request.name}: cached_tokens is {scores.cached_tokens}, expected 0"
        )
    held_version = version_number(scores.weight_version, request.name)
    if serves_adapter:
        check_base(np.array([held_version]), request.name)
        held_version = request.weight_version
    return Rechecked(
        sample_id=request.sample_id,
        part=part,
        server=server,
        weight_version=-1 if request.weight_version is None else request.weight_version,
        held_version=held_version,
        token_ids=request.token_ids,
        first_row=request.rows_start,
        rows=scores.rows,
        log_probs=scores.log_probs[request.rows_start + 1 :],
    )

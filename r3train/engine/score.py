"""Score a given text on a server: the one request behind rechecks, canaries and served teachers.

A text is computed in one prefill; with ``new_tokens`` the server goes on and draws so many greedily.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from r3train.engine.answer import (
    answer_to,
    check_base,
    expect_counts,
    log_probs_of,
    payload,
    version_number,
)
from r3train.engine.backend import Request
from r3train.engine.sglang_http import SGLangHTTP, bound_of_routes, bound_of_texts
from r3train.routing.wire import decode_routed_experts
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
    new_tokens: int = 0  # sampled greedily after it, also past an end-of-text token

    def body(self, rid: str) -> dict[str, Any]:
        """Return the JSON of the request under this id."""
        params: dict[str, Any] = {"max_new_tokens": self.new_tokens, "temperature": 1.0}
        if self.new_tokens:
            params |= {"temperature": 0.0, "ignore_eos": True}
        body = {
            "rid": rid,
            "input_ids": np.asarray(self.token_ids).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": self.log_probs_from,
            "return_routed_experts": self.rows_from is not None,
            "routed_experts_start_len": self.rows_from,
            "extra_key": self.cache_key,
            "lora_path": self.adapter,
        }
        return {name: value for name, value in body.items() if value is not None}

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


def read_scores(
    answer: Any, text: GivenText, rid: str, *, routes: RouteShape | None = None
) -> Scores:
    """Validate and convert the answer to a text; raises the errors of reading in ``score``.

    SGLang 0.5.23 says 0 for the last id of the vocabulary (``logprob_result_processor.py``: an id stays if
    it is below ``vocab_size - 1``); its log-prob is right.  So 0 is taken for the id that was sent.
    """
    name, new_tokens = text.name, text.new_tokens
    answer = answer_to(rid, answer, name)
    meta, reason = answer.meta_info, answer.meta_info.finish_reason
    if reason.type == "abort":
        raise ValueError(f"sample {name}: aborted")
    if reason.type != "length" or reason.length != new_tokens:
        raise ValueError(f"sample {name}: finish_reason is {reason}, expected length {new_tokens}")
    given, num_tokens = len(text.token_ids), len(text.token_ids) + new_tokens
    counts = {"prompt_tokens": given, "completion_tokens": new_tokens}
    expect_counts(meta, name, **counts, cached_tokens=range(given))
    # the token that ends a prefill is not asked for, and SGLang may say its log-prob all the same
    sampled, drawn = (answer.output_ids, meta.output_token_logprobs) if new_tokens else ([], [])
    if len(sampled) != new_tokens:
        raise ValueError(f"sample {name}: {len(sampled)} output_ids, expected {new_tokens}")
    scored = text.token_ids[text.log_probs_from :].tolist()
    entries = meta.input_token_logprobs
    if len(entries) == len(scored):
        entries = [(entry[0], entry[1] or sent) for entry, sent in zip(entries, scored)]
        entries[0] = (0.0, entries[0][1])  # no row predicts it
    log_probs = log_probs_of(entries, scored, name), log_probs_of(drawn, sampled, name)
    rows = np.zeros((num_tokens - 1, 0, 0), dtype=np.uint8)
    if text.rows_from is not None:
        extent = {"num_tokens": num_tokens, "start": text.rows_from, "sample": name}
        rows = decode_routed_experts(payload(meta, "routed_experts", name), routes, **extent)
    return Scores(
        np.concatenate(log_probs),
        rows,
        meta.cached_tokens,
        np.array(sampled, dtype=np.int32),
        meta.weight_version,
    )


def rechecked(
    scores: Scores, request: Request, part: RecheckPart, server: int, *, names_adapter: bool
) -> Rechecked:
    """Make of a request's scores, with rows from ``rows_start`` on, what its samples are compared with.

    names_adapter: see ``Sent``.
    Raises ValueError naming the sample for tokens from the prefix cache, which the comparison would hold against
    themselves, and for a version that is no number.
    """
    if scores.cached_tokens:
        raise ValueError(
            f"sample {request.name}: cached_tokens is {scores.cached_tokens}, expected 0"
        )
    held_version = version_number(scores.weight_version, request.name)
    if names_adapter:
        check_base(held_version, request.name)
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

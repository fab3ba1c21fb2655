"""Read one answer of SGLang's ``/generate``, strictly, into a ``Segment``.

Pure: no network, no clock.  An answer that does not fit raises an error that names the sample, the
value got and the value expected; nothing is cut, padded or guessed.

Source: SGLang 0.5.23, ``meta_info`` of ``/generate`` with ``return_logprob``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from r3train.engine.backend import EngineError, Request, Segment
from r3train.routing.wire import decode_routed_experts
from r3train.types import Rescored, RescoredPart, RouteShape

T = TypeVar("T")

FINISH_REASONS = ("stop", "length", "abort")
ROUTE_PAYLOADS = (str, bytes, memoryview)  # types of base64 routes in a parsed answer


def _strict(read: Callable[..., T]) -> Callable[..., T]:
    """Have a reader raise ValueError, naming the sample, for a value that it did not expect."""

    @wraps(read)
    def reader(answer: Any, request: Request, *rest: Any, **options: Any) -> T:
        try:
            return read(answer, request, *rest, **options)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            about = f"sample {request.name}"
            if isinstance(error, ValueError) and str(error).startswith(about):
                raise
            words = f"{type(error).__name__}: {error}"
            raise ValueError(f"{about}: a damaged answer: {words}") from error

    return reader


@_strict
def read_answer(
    answer: Any,
    request: Request,
    *,
    routes: RouteShape | None,
    decode: Callable[..., np.ndarray] = decode_routed_experts,
    of_adapter: bool = False,
) -> Segment:
    """Validate and convert the answer to a request; ``decode`` makes rows of its routed experts.

    of_adapter: the request named the adapter of its version, and its tokens are of that.

    Raises ValueError naming the sample for an answer that contradicts itself or the request, and
    EngineError when the engine aborted the request for an error of its own.
    """
    name = request.name
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        raise ValueError(f"sample {name}: the answer has no meta_info: {str(answer)[:200]}")
    finish_reason = _finish_reason(meta.get("finish_reason"), name)
    # SGLang answers a request aborted in its queue without counts and routes.  A retracted one
    # waits there too, with tokens and log-probs of its own: keep nothing of it
    never_computed = finish_reason == "abort" and "prompt_tokens" not in meta
    output_ids = _output_ids([] if never_computed else answer.get("output_ids"), name)
    input_len, output_len = len(request.token_ids), len(output_ids)
    if not never_computed:
        for key, expected in (("prompt_tokens", input_len), ("completion_tokens", output_len)):
            if meta.get(key) != expected:
                raise ValueError(f"sample {name}: {key} is {meta.get(key)!r}, expected {expected}")
    if output_len > request.max_new_tokens:
        raise ValueError(
            f"sample {name}: {output_len} output tokens, expected at most {request.max_new_tokens}"
        )
    if output_len == 0 and finish_reason != "abort":
        raise ValueError(f"sample {name}: no output token, finish reason {finish_reason!r}")
    entries = None if never_computed else meta.get("output_token_logprobs")
    log_probs = _log_probs(entries, output_ids, name)
    kept_counts = kept_ids = None
    if request.sampling.kept_of is not None:
        drawn = {} if output_len == 0 else meta
        kept_counts, kept_ids = _kept_tokens(drawn, output_ids, request.sampling.kept_of, name)
        among = _among_kept(drawn.get("output_token_sampling_logprobs", []), output_len, name)
        _check_among_kept(among, log_probs, kept_counts, name)
        log_probs = among
    versions = _versions(meta.get("weight_versions"), output_len, name)
    if of_adapter:
        _check_base(versions, name)
        versions = np.full(output_len, request.weight_version, dtype=np.int32)
    _check_versions(versions, request.weight_version, request.exact_version, name)
    retractions = 0 if never_computed else _retractions(meta, routes is not None, name)
    rows = None
    if routes is not None:
        # a request aborted in the queue was never computed: it has no token and may have no row
        rows = (
            _rows(
                meta.get("routed_experts"),
                routes,
                input_len + output_len,
                request.rows_start,
                name,
                decode,
            )
            if output_len
            else np.zeros((0, *routes.row), dtype=routes.dtype)
        )
    return Segment(
        output_ids,
        log_probs,
        versions,
        rows,
        request.rows_start,
        finish_reason,
        retractions,
        kept_counts=kept_counts,
        kept_ids=kept_ids,
    )


@_strict
def read_rescored(
    answer: Any,
    request: Request,
    part: RescoredPart,
    server: int,
    *,
    routes: RouteShape,
    of_adapter: bool = False,
) -> Rescored:
    """Validate and convert the answer to a text that was computed again; of_adapter: see ``read_answer``.

    Raises ValueError naming the sample: for an aborted one, for one that took tokens from the prefix
    cache, and for one that contradicts itself or the request.
    """
    name, num_tokens = request.name, len(request.token_ids)
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        raise ValueError(f"sample {name}: the answer has no meta_info: {str(answer)[:200]}")
    if _finish_reason(meta.get("finish_reason"), name) == "abort":
        raise ValueError(f"sample {name}: aborted")
    expected = {"prompt_tokens": num_tokens, "completion_tokens": 0, "cached_tokens": 0}
    for key, value in expected.items():
        if meta.get(key) != value:
            raise ValueError(f"sample {name}: {key} is {meta.get(key)!r}, expected {value}")
    label = str(meta.get("weight_version"))
    if not label.isdigit():
        raise ValueError(f"sample {name}: weight version {label!r}, expected a number")
    if of_adapter:
        _check_base(np.array([int(label)]), name)
        label = str(request.weight_version)
    scored = input_log_probs(meta, request.token_ids, name)
    start = request.rows_start
    rows = _rows(meta.get("routed_experts"), routes, num_tokens, start, name, decode_routed_experts)
    return Rescored(
        sample_id=request.sample_id,
        part=part,
        server=server,
        weight_version=-1 if request.weight_version is None else request.weight_version,
        held_version=int(label),
        token_ids=request.token_ids,
        first_row=start,
        rows=rows,
        log_probs=scored[start + 1 :],
    )


def input_log_probs(meta: Mapping[str, Any], token_ids: np.ndarray, name: str) -> np.ndarray:
    """Read the log-probs of a text that was sent: float32[T], 0 for the first token, which has none.

    SGLang 0.5.23 says 0 for the last id of the vocabulary (``logprob_result_processor.py``: an id stays if
    it is below ``vocab_size - 1``); its log-prob is right.  So 0 is taken for the id that was sent.
    Raises ValueError if another text was scored.
    """
    entries = meta.get("input_token_logprobs")
    if isinstance(entries, list) and len(entries) == len(token_ids) and entries:
        entries = [[e[0], e[1] or sent] for e, sent in zip(entries, token_ids, strict=True)]
        entries[0][0] = 0.0
    return _log_probs(entries, np.asarray(token_ids), name)


def _check_versions(
    versions: np.ndarray, weight_version: int | None, exact: bool, name: str
) -> None:
    if weight_version is None or len(versions) == 0:
        return
    got = np.unique(versions).tolist()
    if exact and got != [weight_version]:
        raise ValueError(f"sample {name}: weight versions {got}, expected {weight_version} alone")
    if got[0] < weight_version or (np.diff(versions) < 0).any():
        raise ValueError(
            f"sample {name}: weight versions {got}, expected rising ones from {weight_version} on"
        )


def _check_base(labels: np.ndarray, name: str) -> None:
    """Raise ValueError unless a server of adapters labels its base as it was started: 0."""
    if (labels != 0).any():
        raise ValueError(
            f"sample {name}: the server's base has weight version {labels.max()}, expected 0: it was"
            " updated, and --lora-serving adapter sends adapters alone"
        )


def _retractions(meta: Mapping[str, Any], needed: bool, name: str) -> int:
    """``num_retractions``; an answer with routes must say it."""
    count = meta.get("num_retractions", None if needed else 0)
    if type(count) is not int or count < 0:
        raise ValueError(f"sample {name}: num_retractions is {count!r}, expected a count")
    return count


def _rows(
    payload: Any,
    routes: RouteShape,
    num_tokens: int,
    start: int,
    name: str,
    decode: Callable[..., np.ndarray],
) -> np.ndarray:
    """The rows of one answer, from row ``start`` on: [num_tokens-1-start, L, K]."""
    if not isinstance(payload, ROUTE_PAYLOADS):
        raise ValueError(
            f"sample {name}: the answer carries no routed_experts; is the server started with "
            "--enable-return-routed-experts, and is no router in front of it?"
        )
    return decode(payload, routes, num_tokens=num_tokens, start=start, sample=name)


def _finish_reason(reason: Any, name: str) -> str:
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if kind not in FINISH_REASONS:
        raise ValueError(
            f"sample {name}: finish_reason is {reason!r}, expected a type of {FINISH_REASONS}"
        )
    if kind == "abort" and reason.get("status_code"):
        raise EngineError(
            f"sample {name}: the engine aborted it ({reason['status_code']}): "
            f"{reason.get('message')}"
        )
    return kind


def _output_ids(output_ids: Any, name: str) -> np.ndarray:
    if not isinstance(output_ids, list) or not all(isinstance(i, int) for i in output_ids):
        raise ValueError(f"sample {name}: output_ids is no list of token ids")
    return np.asarray(output_ids, dtype=np.int32)


def _log_probs(entries: Any, token_ids: np.ndarray, name: str) -> np.ndarray:
    """``[[log_prob, token_id, text], ...]`` -> float32[R]; the ids must be ``token_ids``."""
    if entries is None and len(token_ids) == 0:
        return np.zeros(0, dtype=np.float32)
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        got = len(entries) if isinstance(entries, list) else entries
        raise ValueError(f"sample {name}: {got} log-probs for {len(token_ids)} tokens")
    ids = np.asarray([entry[1] for entry in entries], dtype=np.int32)
    if not np.array_equal(ids, token_ids):
        at = int(np.argmax(ids != token_ids))
        raise ValueError(
            f"sample {name}: log-prob {at} is of token {int(ids[at])}, token {at} is "
            f"{int(token_ids[at])}"
        )
    return _finite(np.asarray([entry[0] for entry in entries], dtype=np.float32), name)


def _kept_tokens(
    meta: Mapping[str, Any], token_ids: np.ndarray, vocab_size: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """``output_token_sampling_mask`` [[id, ...], ...] -> counts int32[O], ids int32[counts.sum()]."""
    kept = meta.get("output_token_sampling_mask", None if len(token_ids) else [])
    if not isinstance(kept, list) or len(kept) != len(token_ids):
        got = len(kept) if isinstance(kept, list) else "no"
        raise ValueError(
            f"sample {name}: output_token_sampling_mask has {got} rows, expected {len(token_ids)}, one"
            " an output token"
        )
    counts = np.array([len(row) for row in kept], dtype=np.int32)
    ids = np.array([token for row in kept for token in row], dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"sample {name}: kept token {wrong} is not in 0..{vocab_size - 1}")
    places = np.repeat(np.arange(len(counts)), counts)
    # this runs in the producer's event loop: np.unique takes some fifty times as long as a sort
    if (np.diff(np.sort(places * vocab_size + ids)) == 0).any():
        raise ValueError(f"sample {name}: output_token_sampling_mask names a token twice in a row")
    drawn = np.zeros(len(counts), dtype=bool)
    drawn[places[ids == token_ids[places]]] = True
    if not drawn.all():
        at = int(np.argmin(drawn))
        raise ValueError(
            f"sample {name}: output token {at} is {int(token_ids[at])}, which is none of the"
            f" {counts[at]} tokens that sampling kept there"
        )
    return counts, ids.astype(np.int32)


def _among_kept(values: Any, response_len: int, name: str) -> np.ndarray:
    """``output_token_sampling_logprobs`` [log_prob, ...] -> float32[R], those among the kept tokens."""
    if not isinstance(values, list) or len(values) != response_len:
        got = len(values) if isinstance(values, list) else "no"
        raise ValueError(
            f"sample {name}: {got} output_token_sampling_logprobs, expected {response_len}"
        )
    return _finite(np.asarray(values, dtype=np.float32), name)


def _check_among_kept(among: np.ndarray, of_all: np.ndarray, counts: np.ndarray, name: str) -> None:
    """Tie log-probs to the kept tokens: none is below that among all tokens, that of one alone is 0."""
    if (low := among < of_all - 1e-3).any():
        at = int(np.argmax(low))
        raise ValueError(
            f"sample {name}: log-prob {at} among the kept tokens is {among[at]}, expected at least"
            f" {of_all[at]}, that among all tokens"
        )
    if (off := (counts == 1) & (np.abs(among) >= 1e-4)).any():
        at = int(np.argmax(off))
        raise ValueError(f"sample {name}: log-prob {at} is {among[at]} where one token was kept")


def _finite(values: np.ndarray, name: str) -> np.ndarray:
    if not np.isfinite(values).all():
        at = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"sample {name}: log-prob {at} is {values[at]}, expected a finite number")
    return values


def _versions(spans: Any, response_len: int, name: str) -> np.ndarray:
    """``[{version, start, end}, ...]`` over the output tokens -> int32[R]."""
    versions = np.full(response_len, -1, dtype=np.int32)
    if response_len == 0:
        return versions
    if not isinstance(spans, list) or not spans:
        raise ValueError(f"sample {name}: the answer carries no weight_versions")
    end = 0
    for span in spans:
        label = str(span.get("version"))
        if not label.isdigit():
            raise ValueError(
                f"sample {name}: weight version {label!r}, expected a number; was the server "
                "started with --weight-version 0?"
            )
        if span.get("start") != end or not end <= span.get("end", -1) <= response_len:
            raise ValueError(
                f"sample {name}: weight_versions {spans} do not cover {response_len} output tokens"
            )
        versions[end : span["end"]] = int(label)
        end = span["end"]
    if end != response_len:
        raise ValueError(
            f"sample {name}: weight_versions end at {end}, expected {response_len} output tokens"
        )
    return versions

"""Read one answer of SGLang's ``/generate``, strictly, into a ``Segment``.

Pure: no network, no clock.  An answer that does not fit raises an error that names the sample, the
value got and the value expected; nothing is cut, padded or guessed.

Source: SGLang 0.5.23, ``meta_info`` of ``/generate`` with ``return_logprob``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from r3train.data.sampled import no_log_prob, outside_vocabulary
from r3train.engine.backend import BadAnswer, BUSY, EngineBusy
from r3train.engine.backend import Drafts, Request, Segment
from r3train.routing import indexer_topk
from r3train.routing.wire import decode_routed_experts
from r3train.types import RouteShape

T = TypeVar("T")

FINISH_REASONS = ("stop", "length", "abort")
ROUTE_PAYLOADS = (str, bytes, memoryview)  # types of base64 routes and choices in a parsed answer
# ids of tokens that a model can have, where its vocabulary is not known
_ANY_VOCABULARY = 1 << 31


@dataclass(frozen=True, slots=True)
class Sent:
    """Facts of a request as it was sent: its answer is held against these and ``Request``.

    None is not known.
    """

    rid: str  # its id, which the answer must repeat
    vocab_size: int | None = None  # of the model
    newest_version: int | None = (
        None  # newest weights that a server was given before the answer came
    )
    # tokens at which the server ends a text for want of room: see ``EngineControl.text_ends``
    ends_at: range | None = None
    may_abort: bool = False  # True: this client told the server to abort it


def strict(read: Callable[..., T]) -> Callable[..., T]:
    """Have a reader raise ValueError, naming the sample, for a value that it did not expect.

    What it reads for is its second argument, and has a ``name``.
    """

    @wraps(read)
    def reader(answer: Any, asked: Any, *rest: Any, **options: Any) -> T:
        try:
            return read(answer, asked, *rest, **options)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            about = f"sample {asked.name}"
            if isinstance(error, ValueError) and str(error).startswith(about):
                raise
            words = f"{type(error).__name__}: {error}"
            raise ValueError(f"{about}: a damaged answer: {words}") from error

    return reader


@strict
def read_answer(
    answer: Any,
    request: Request,
    sent: Sent,
    *,
    routes: RouteShape | None,
    decode: Callable[..., np.ndarray] = decode_routed_experts,
    index_topk: int | None = None,
    serves_adapter: bool = False,
) -> Segment:
    """Validate and convert the answer to a request; ``decode`` makes rows of its routed experts.

    index_topk: the tokens that an indexer chooses for a row, where the answer must say them with its routes;
    serves_adapter: the request named the adapter of its version, and its tokens are of that.

    Raises ValueError naming the sample for an answer that contradicts itself or the request, or that the engine
    aborted for an error of its own, and EngineBusy where that error says to ask later.
    """
    name = request.name
    meta = meta_of(answer, sent.rid, name)
    finish_reason = finish_kind(meta.get("finish_reason"), name)
    if finish_reason == "abort" and not sent.may_abort:
        raise ValueError(
            f"sample {name}: finish_reason is {meta['finish_reason']!r}, and nobody here aborted it"
        )
    # SGLang answers per request aborted in its queue without counts and routes.  A retracted one
    # waits there too, with tokens and log-probs of its own: keep nothing of it
    never_computed = finish_reason == "abort" and "prompt_tokens" not in meta
    vocab_size = sent.vocab_size or _ANY_VOCABULARY
    output_ids = output_token_ids(
        [] if never_computed else answer.get("output_ids"), name, vocab_size
    )
    input_len, output_len = len(request.token_ids), len(output_ids)
    if not never_computed:
        expect_counts(meta, name, prompt_tokens=input_len, completion_tokens=output_len)
    if output_len > request.max_new_tokens:
        raise ValueError(
            f"sample {name}: {output_len} output tokens, expected at most {request.max_new_tokens}"
        )
    if output_len == 0 and finish_reason != "abort":
        raise ValueError(f"sample {name}: no output token, finish reason {finish_reason!r}")
    _check_end(meta["finish_reason"], output_ids, request, sent.ends_at)
    log_probs, mask_counts, mask_ids = _log_probs_and_mask(
        {} if never_computed else meta, output_ids, request.sampling.mask_vocab, name
    )
    versions = _versions(meta.get("weight_versions"), output_len, name)
    if serves_adapter:
        check_base(versions, name)
        versions = np.full(output_len, request.weight_version, dtype=np.int32)
    _check_versions(versions, request.weight_version, request.exact_version, name)
    _check_newest(versions, sent.newest_version, name)
    retractions = 0 if never_computed else _retractions(meta, routes is not None, name)
    cached = 0 if never_computed else _cached_tokens(meta, input_len, routes is not None, name)
    start, rows = request.rows_start, None
    if routes is not None and output_len:
        payload = meta.get("routed_experts")
        rows = routed_rows(payload, routes, input_len + output_len, start, name, decode)
    elif routes is not None:
        # a request aborted in the queue was never computed: it has no token and may have no row
        rows = np.zeros((0, *routes.row), dtype=routes.dtype)
    chosen = None
    if routes is not None and index_topk is not None:
        payload = meta.get("indexer_topk")
        chosen = np.zeros((0, routes.num_layers, 0), dtype="<u8")
        if output_len:
            num_layers, num_tokens = routes.num_layers, input_len + output_len
            chosen = _chosen(payload, num_layers, index_topk, num_tokens, start, name)
    return Segment(
        output_ids,
        log_probs,
        versions,
        rows,
        start,
        finish_reason,
        retractions,
        cached_tokens=cached,
        drafts=Drafts() if never_computed else _drafts(meta, name),
        mask_counts=mask_counts,
        mask_ids=mask_ids,
        indexer_topk=chosen,
        indexer_start=max(start, index_topk or 0),
    )


def input_log_probs(meta: Mapping[str, Any], token_ids: np.ndarray, name: str) -> np.ndarray:
    """Read the log-probs of a text that was sent: float32[T], 0 for the first token, which has none.

    SGLang 0.5.23 says 0 for the last id of the vocabulary (``logprob_result_processor.py``: an id stays if
    it is below ``vocab_size - 1``); its log-prob is right.  So 0 is taken for the id that was sent.
    Raises ValueError if another text was scored.
    """
    entries = meta.get("input_token_logprobs")
    if isinstance(entries, list) and len(entries) == len(token_ids) and entries:
        sent = np.asarray(token_ids).tolist()
        entries = [[e[0], sent[i] if e[1] == 0 else e[1]] for i, e in enumerate(entries)]
        entries[0][0] = 0.0
    return output_log_probs(entries, np.asarray(token_ids), name)


def _log_probs_and_mask(
    meta: Mapping[str, Any], output_ids: np.ndarray, mask_vocab: int | None, name: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Log-probs float32[T] of the output, and counts and ids of its sampling mask where one was asked for.

    With a mask the log-probs are those within it.  meta: empty for a request that was never computed.
    """
    log_probs = output_log_probs(meta.get("output_token_logprobs"), output_ids, name)
    if mask_vocab is None:
        return log_probs, None, None
    sampled = meta if len(output_ids) else {}
    counts, ids = _sampling_mask(sampled, output_ids, mask_vocab, name)
    entries = sampled.get("output_token_sampling_logprobs", [])
    within = _within_mask(entries, len(output_ids), name)
    _check_within_mask(within, log_probs, counts, name)
    return within, counts, ids


def _check_versions(
    versions: np.ndarray, weight_version: int | None, exact: bool, name: str
) -> None:
    if weight_version is None or len(versions) == 0:
        return
    got = np.unique(versions).tolist()
    if exact and got != [weight_version]:
        raise ValueError(f"sample {name}: weight versions {got}, expected {weight_version} only")
    if got[0] < weight_version or (np.diff(versions) < 0).any():
        raise ValueError(
            f"sample {name}: weight versions {got}, expected rising ones from {weight_version} on"
        )


def _check_newest(versions: np.ndarray, newest: int | None, name: str) -> None:
    """Raise ValueError for a token of weights that no server was given yet."""
    if newest is not None and len(versions) and versions.max() > newest:
        raise ValueError(
            f"sample {name}: a token of weight version {versions.max()}, the servers were given"
            f" {newest} at most"
        )


def _check_end(
    reason: Mapping[str, Any], output_ids: np.ndarray, request: Request, ends_at: range | None
) -> None:
    """Raise ValueError for an answer that does not end where its finish_reason says.

    A stop token is the last one, named by the reason.  A ``length`` is the one asked for; SGLang 0.5.23
    gives less where the text comes to ``ends_at``, and then says the length that it gave.
    """
    name, count, max_tokens = request.name, len(output_ids), request.max_new_tokens
    kind, sampling = reason["type"], request.sampling
    if kind == "length":
        if reason.get("length") != count:
            raise ValueError(
                f"sample {name}: finish_reason is {reason!r}, {count} tokens were sent"
            )
        if count != max_tokens and (
            ends_at is None or len(request.token_ids) + count not in ends_at
        ):
            room = f", and the server has room for a text of {ends_at[-1]}" if ends_at else ""
            raise ValueError(
                f"sample {name}: finish_reason is 'length' after {count} tokens, {max_tokens} were asked"
                f" for{room}"
            )
    stops = () if sampling.ignore_eos else sampling.stop_token_ids
    if kind == "stop":
        last, matched = int(output_ids[-1]), reason.get("matched")
        may_end = (*stops, *(() if sampling.ignore_eos else sampling.may_stop_at))
        if type(matched) is not int or matched != last or last not in may_end:
            raise ValueError(
                f"sample {name}: finish_reason is {reason!r} and the last token {last}, expected one of"
                f" the stop tokens {sorted(may_end)}"
            )
    goes_on = output_ids if kind == "length" else output_ids[:-1]
    if len(stops) and (found := np.isin(goes_on, stops)).any():
        at = int(np.argmax(found))
        raise ValueError(
            f"sample {name}: output token {at} is the stop token {int(goes_on[at])}, and"
            f" {count - at - 1} follow, with the finish reason {kind!r}"
        )


def check_base(labels: np.ndarray, name: str) -> None:
    """Raise ValueError unless a server of adapters labels its base as it was started: 0."""
    if (labels != 0).any():
        raise ValueError(
            f"sample {name}: the server's base has weight version {labels.max()}, expected 0: it was"
            " updated, and --lora-serving adapter sends adapters only"
        )


def _retractions(meta: Mapping[str, Any], needed: bool, name: str) -> int:
    """``num_retractions``; an answer with routes must say it."""
    count = meta.get("num_retractions", None if needed else 0)
    if type(count) is not int or count < 0:
        raise ValueError(f"sample {name}: num_retractions is {count!r}, expected a count")
    return count


def _drafts(meta: Mapping[str, Any], name: str) -> Drafts:
    """``spec_num_proposed_drafts`` and its like, absent without speculative decoding.

    Source: SGLang 0.5.23, ``TokenizerManager._calculate_spec_decoding_metrics``.
    """
    if "spec_verify_ct" not in meta:
        return Drafts()
    found = tuple(
        meta.get(f"spec_{key}")
        for key in ("num_proposed_drafts", "num_correct_drafts", "verify_ct")
    )
    if not all(type(count) is int for count in found) or not (
        0 <= found[1] <= found[0] and found[2] > 0
    ):
        raise ValueError(
            f"sample {name}: {found[1]!r} of {found[0]!r} drafts were right in {found[2]!r} verifications:"
            " expected counts, and not more right ones than drafts"
        )
    return Drafts(*found)


def _cached_tokens(meta: Mapping[str, Any], input_len: int, needed: bool, name: str) -> int:
    """``cached_tokens``; an answer with routes must say it.  A server computes the last token at least."""
    count = meta.get("cached_tokens", None if needed else 0)
    if type(count) is not int or not 0 <= count < input_len:
        got = repr(count)[:100]
        raise ValueError(
            f"sample {name}: cached_tokens is {got}, expected 0 to {input_len - 1} of the"
            f" {input_len} tokens that were sent"
        )
    return count


def routed_rows(
    payload: Any,
    routes: RouteShape,
    num_tokens: int,
    start: int,
    name: str,
    decode: Callable[..., np.ndarray] = decode_routed_experts,
) -> np.ndarray:
    """The rows of one answer, from row ``start`` on: [num_tokens-1-start, L, K]."""
    if not isinstance(payload, ROUTE_PAYLOADS):
        raise ValueError(
            f"sample {name}: the answer carries no routed_experts; is the server started with "
            "--enable-return-routed-experts, and is no router in front of it?"
        )
    return decode(payload, routes, num_tokens=num_tokens, start=start, sample=name)


def _chosen(
    payload: Any, num_layers: int, topk: int, num_tokens: int, start: int, name: str
) -> np.ndarray:
    """The choices of indexers for one answer's rows from max(start, topk) on: uint64[R, L, W]."""
    if not isinstance(payload, ROUTE_PAYLOADS):
        raise ValueError(
            f"sample {name}: the answer carries no indexer_topk; is the server started with "
            "--enable-return-indexer-topk, and is no router in front of it?"
        )
    of_sample = {"num_tokens": num_tokens, "num_layers": num_layers, "start": start, "sample": name}
    return indexer_topk.decode(payload, topk=topk, **of_sample)


def finish_kind(reason: Any, name: str) -> str:
    """Return ``stop``, ``length`` or ``abort``; raises EngineBusy or BadAnswer for an abort with a status."""
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if kind not in FINISH_REASONS:
        raise ValueError(
            f"sample {name}: finish_reason is {reason!r}, expected a type of {FINISH_REASONS}"
        )
    if kind == "abort" and (status := reason.get("status_code")):
        said = f"({str(status)[:100]}): {str(reason.get('message'))[:2000]}"
        raise (EngineBusy if status in BUSY else BadAnswer)(
            f"sample {name}: the engine aborted it {said}"
        )
    return kind


def meta_of(answer: Any, rid: str, name: str) -> Mapping[str, Any]:
    """Return ``meta_info`` of an answer; raises ValueError without one, and for another request's answer."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        raise ValueError(f"sample {name}: the answer has no meta_info: {str(answer)[:200]}")
    if meta.get("id") != rid:
        got = str(meta.get("id"))[:100]
        raise ValueError(f"sample {name}: the answer is to the request {got!r}, expected {rid!r}")
    return meta


def expect_counts(meta: Mapping[str, Any], name: str, **expected: int) -> None:
    """Raise ValueError naming the first number of ``meta_info`` that is not the expected one."""
    for key, value in expected.items():
        if type(meta.get(key)) is not int or meta[key] != value:
            got = repr(meta.get(key))[:100]
            raise ValueError(f"sample {name}: {key} is {got}, expected {value}")


def _only(kinds: set[type], values: list[Any]) -> bool:
    """True if every value is of these types; a bool is no int."""
    return set(map(type, values)) <= kinds


def output_token_ids(output_ids: Any, name: str, vocab_size: int = _ANY_VOCABULARY) -> np.ndarray:
    """Return the drawn ids as int32[O]; raises ValueError for what is no list of ids below ``vocab_size``."""
    if not isinstance(output_ids, list) or not _only({int}, output_ids):
        raise ValueError(f"sample {name}: output_ids is no list of token ids")
    ids = np.asarray(output_ids, dtype=np.int64)
    if found := outside_vocabulary(ids, vocab_size):
        raise ValueError(f"sample {name}: output {found}")
    return ids.astype(np.int32)


def output_log_probs(entries: Any, token_ids: np.ndarray, name: str) -> np.ndarray:
    """``[[log_prob, token_id, text], ...]`` -> float32[R]; the ids must be ``token_ids``."""
    if entries is None and len(token_ids) == 0:
        return np.zeros(0, dtype=np.float32)
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        got = len(entries) if isinstance(entries, list) else entries
        raise ValueError(f"sample {name}: {got} log-probs for {len(token_ids)} tokens")
    # lists: ids that are equal to those checked need no array of their own
    named, expected = [entry[1] for entry in entries], token_ids.tolist()
    if named != expected:
        at = next(i for i, (got, sent) in enumerate(zip(named, expected)) if got != sent)
        raise ValueError(
            f"sample {name}: log-prob {at} is of token {str(named[at])[:100]}, token {at} is"
            f" {expected[at]}"
        )
    return _numbers([entry[0] for entry in entries], name)


def _sampling_mask(
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
        raise ValueError(
            f"sample {name}: token of a sampling mask {wrong} is not in 0..{vocab_size - 1}"
        )
    places = np.repeat(np.arange(len(counts)), counts)
    # this runs in the producer's event loop: np.unique takes some fifty times as long as a sort
    if (np.diff(np.sort(places * vocab_size + ids)) == 0).any():
        raise ValueError(f"sample {name}: output_token_sampling_mask names a token twice in a row")
    sampled = np.zeros(len(counts), dtype=bool)
    sampled[places[ids == token_ids[places]]] = True
    if not sampled.all():
        at = int(np.argmin(sampled))
        raise ValueError(
            f"sample {name}: output token {at} is {int(token_ids[at])}, which is none of the"
            f" {counts[at]} tokens that sampling kept there"
        )
    return counts, ids.astype(np.int32)


def _within_mask(values: Any, response_len: int, name: str) -> np.ndarray:
    """``output_token_sampling_logprobs`` [log_prob, ...] -> float32[R], those within the sampling mask."""
    if not isinstance(values, list) or len(values) != response_len:
        got = len(values) if isinstance(values, list) else "no"
        raise ValueError(
            f"sample {name}: {got} output_token_sampling_logprobs, expected {response_len}"
        )
    return _numbers(values, name)


def _check_within_mask(
    masked: np.ndarray, unmasked: np.ndarray, counts: np.ndarray, name: str
) -> None:
    """Tie log-probs to the sampling masks: none is below that among all tokens, that of one alone is 0."""
    if (low := masked < unmasked - 1e-3).any():
        at = int(np.argmax(low))
        raise ValueError(
            f"sample {name}: log-prob {at} within the sampling mask is {masked[at]}, expected at least"
            f" {unmasked[at]}, that among all tokens"
        )
    if (off := (counts == 1) & (np.abs(masked) >= 1e-4)).any():
        at = int(np.argmax(off))
        raise ValueError(f"sample {name}: log-prob {at} is {masked[at]} where one token was kept")


def _numbers(values: list[Any], name: str) -> np.ndarray:
    """Log-probs -> float32[R]; raises ValueError for one that is no number, or that none can be."""
    if not _only({float, int}, values):
        at = next(i for i, value in enumerate(values) if type(value) not in (float, int))
        raise ValueError(
            f"sample {name}: log-prob {at} is {str(values[at])[:100]!r}, expected a number"
        )
    # as float64: a number past float32 would be infinite, and warn
    numbers = np.asarray(values, dtype=np.float64)
    if found := no_log_prob(numbers):
        raise ValueError(f"sample {name}: {found}")
    return numbers.astype(np.float32)


def _versions(spans: Any, response_len: int, name: str) -> np.ndarray:
    """``[{version, start, end}, ...]`` over the output tokens -> int32[R]."""
    versions = np.full(response_len, -1, dtype=np.int32)
    if response_len == 0:
        return versions
    if not isinstance(spans, list) or not spans:
        raise ValueError(f"sample {name}: the answer carries no weight_versions")
    end = 0
    for span in spans:
        label, start, stop = version_number(span.get("version"), name), span["start"], span["end"]
        if not _only({int}, [start, stop]) or start != end or not end <= stop <= response_len:
            raise ValueError(
                f"sample {name}: weight_versions {str(spans)[:200]} do not cover {response_len} output"
                " tokens"
            )
        versions[end:stop] = label
        end = stop
    if end != response_len:
        raise ValueError(
            f"sample {name}: weight_versions end at {end}, expected {response_len} output tokens"
        )
    return versions


def version_number(label: Any, name: str) -> int:
    """A weight version as SGLang says it, a text of digits."""
    if type(label) is not str or not (label.isascii() and label.isdigit()) or len(label) > 9:
        raise ValueError(
            f"sample {name}: weight version {str(label)[:100]!r}, expected a number; was the server "
            "started with --weight-version 0?"
        )
    return int(label)

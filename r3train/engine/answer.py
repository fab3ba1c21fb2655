"""SGLang's answers to ``/generate``: their types, and the reader that makes one a ``Segment``.

Pure: no network, no clock.  A value of another type or range is refused by its place in the answer, and an
answer that does not fit its request by the sample.  Nothing is cut, padded or guessed.

Source: SGLang 0.5.23, ``meta_info`` of ``/generate`` with ``return_logprob``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, UNSET, UnsetType

from r3train.data.sampled import LARGEST_LOG_PROB, SMALLEST_LOG_PROB, outside_vocabulary
from r3train.engine.backend import BadAnswer, BUSY, EngineBusy
from r3train.engine.backend import Drafts, Request, Segment
from r3train.engine.typed import typed
from r3train.routing import indexer_topk
from r3train.routing.wire import decode_routed_experts
from r3train.types import RouteShape

ROUTE_PAYLOADS = (str, bytes, memoryview)  # types of base64 routes and choices in a parsed answer
# ids of tokens that a model can have, where its vocabulary is not known
_ANY_VOCABULARY = 1 << 31
_ANY_COUNT = range(1 << 53)

Count = Annotated[int, Meta(ge=0, lt=_ANY_COUNT.stop)]
TokenId = Annotated[int, Meta(ge=0, lt=_ANY_VOCABULARY)]
LogProb = Annotated[float, Meta(ge=SMALLEST_LOG_PROB, le=LARGEST_LOG_PROB)]


class FinishReason(Struct, frozen=True, repr_omit_defaults=True):
    """The way in which an answer ended."""

    type: Annotated[str, Meta(pattern=r"\A(stop|length|abort)\Z")]  # a Literal would name no values
    length: Count | None = None
    matched: int | str | None = None  # the stop token, or a text that the server looks for
    status_code: int | None = None  # of an abort for an error of the engine
    message: str | None = None


class VersionSpan(Struct, frozen=True):
    """The weight version of output tokens ``start``..``end - 1``."""

    version: str
    start: Count
    end: Count


class AnswerMeta(Struct, frozen=True):
    """``meta_info``; UNSET is a field that an answer of another request may lack."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: Count | UnsetType = UNSET
    completion_tokens: Count | UnsetType = UNSET
    cached_tokens: Count | UnsetType = UNSET
    num_retractions: Count | UnsetType = UNSET
    weight_version: str | None = None
    weight_versions: list[VersionSpan] = []
    input_token_logprobs: list[tuple[LogProb | None, TokenId, Any]] = []
    output_token_logprobs: list[tuple[LogProb, TokenId, Any]] = []
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[LogProb] | None = None
    routed_experts: Any = None
    indexer_topk: Any = None
    # with speculative decoding (``TokenizerManager._calculate_spec_decoding_metrics``)
    spec_num_proposed_drafts: Count | UnsetType = UNSET
    spec_num_correct_drafts: Count | UnsetType = UNSET
    spec_verify_ct: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class Answer(Struct, frozen=True):
    """The answer to a request for tokens, or for the log-probs of a text."""

    meta_info: AnswerMeta
    output_ids: list[TokenId] = []


@dataclass(frozen=True, slots=True)
class Sent:
    """Facts of a request as it was sent: its answer is compared with these and ``Request``.

    None is not known.
    """

    rid: str  # its id, which the answer must repeat
    vocab_size: int | None = None  # of the model
    newest_version: int | None = None  # of weights that a server was given before the answer came
    # tokens at which the server ends a text for want of room: see ``EngineControl.text_ends``
    ends_at: range | None = None
    may_abort: bool = False  # True: this client told the server to abort it
    names_adapter: bool = False  # True: its tokens are of the adapter of its version


def read_answer(
    answer: Any,
    request: Request,
    sent: Sent,
    *,
    routes: RouteShape | None,
    decode: Callable[..., np.ndarray] = decode_routed_experts,
    index_topk: int | None = None,
) -> Segment:
    """Validate and convert the answer to a request; ``decode`` makes rows of its routed experts.

    index_topk: the tokens that an indexer chooses for a row, where the answer must say them with its routes.
    Raises ValueError naming the sample for an answer that contradicts itself or the request, or that the engine
    aborted for an error of its own, and EngineBusy where that error says to ask later.
    """
    name, answer = request.name, answer_to(sent.rid, answer, request.name)
    meta, finish_reason = answer.meta_info, answer.meta_info.finish_reason.type
    if finish_reason == "abort" and not sent.may_abort:
        raise ValueError(
            f"sample {name}: finish_reason is {meta.finish_reason}, and nobody here aborted it"
        )
    # SGLang answers per request aborted in its queue without counts and routes.  A retracted one
    # waits there too, with tokens and log-probs of its own: keep nothing of it
    never_computed = finish_reason == "abort" and meta.prompt_tokens is UNSET
    if never_computed:
        answer = Answer(AnswerMeta(meta.id, meta.finish_reason))
        meta = answer.meta_info
    output_ids = np.array(answer.output_ids, dtype=np.int32)
    if found := outside_vocabulary(output_ids, sent.vocab_size or _ANY_VOCABULARY):
        raise ValueError(f"sample {name}: output {found}")
    input_len, output_len = len(request.token_ids), len(output_ids)
    counts = {"prompt_tokens": input_len, "completion_tokens": output_len}
    if routes is not None or meta.cached_tokens is not UNSET:
        counts["cached_tokens"] = range(input_len)  # the last token is always computed
    if routes is not None:
        counts["num_retractions"] = _ANY_COUNT
    if not never_computed:
        expect_counts(meta, name, **counts)
    if output_len > request.max_new_tokens:
        raise ValueError(
            f"sample {name}: {output_len} output tokens, expected at most {request.max_new_tokens}"
        )
    if output_len == 0 and finish_reason != "abort":
        raise ValueError(f"sample {name}: no output token, finish reason {finish_reason!r}")
    _check_end(meta.finish_reason, output_ids, request, sent.ends_at)
    log_probs = log_probs_of(meta.output_token_logprobs, answer.output_ids, name)
    mask_counts = mask_ids = None
    if request.sampling.mask_vocab is not None:
        log_probs, mask_counts, mask_ids = _sampling_mask(meta, output_ids, log_probs, request)
    versions = _versions(meta.weight_versions, output_len, name)
    if sent.names_adapter:
        check_base(versions.max(initial=0), name)
        versions = np.full(output_len, request.weight_version, dtype=np.int32)
    _check_versions(versions, request, sent.newest_version)
    start, rows, chosen = request.rows_start, None, None
    if routes is not None:
        # a request aborted in the queue was never computed: it has no token and may have no row
        rows = np.zeros((0, *routes.row), dtype=routes.dtype)
        chosen = np.zeros((0, routes.num_layers, 0), "<u8") if index_topk is not None else None
    if routes is not None and output_len:
        extent = {"num_tokens": input_len + output_len, "start": start, "sample": name}
        rows = decode(payload(meta, "routed_experts", name), routes, **extent)
        if index_topk is not None:
            extent |= {"num_layers": routes.num_layers, "topk": index_topk}
            chosen = indexer_topk.decode(payload(meta, "indexer_topk", name), **extent)
    return Segment(
        output_ids,
        log_probs,
        versions,
        rows,
        start,
        finish_reason,
        meta.num_retractions or 0,
        cached_tokens=meta.cached_tokens or 0,
        drafts=_drafts(meta, name),
        mask_counts=mask_counts,
        mask_ids=mask_ids,
        indexer_topk=chosen,
        indexer_start=max(start, index_topk or 0),
    )


def answer_to(rid: str, answer: Any, name: str) -> Answer:
    """Convert parsed JSON to the answer to request ``rid``; raises ValueError for another request's.

    Raises EngineBusy or BadAnswer where the engine aborted it for an error of its own.
    """
    typed_answer = typed(answer, Answer, f"sample {name}")
    meta, reason = typed_answer.meta_info, typed_answer.meta_info.finish_reason
    if meta.id != rid:
        got = meta.id[:100]
        raise ValueError(f"sample {name}: the answer is to the request {got!r}, expected {rid!r}")
    if reason.type == "abort" and reason.status_code:
        said = f"({reason.status_code}): {str(reason.message)[:2000]}"
        raise (EngineBusy if reason.status_code in BUSY else BadAnswer)(
            f"sample {name}: the engine aborted it {said}"
        )
    return typed_answer


def expect_counts(meta: AnswerMeta, name: str, **expected: int | range) -> None:
    """Raise ValueError naming the first field that is not this count, or none in the range."""
    for key, count in expected.items():
        got, counts = getattr(meta, key), range(count, count + 1) if type(count) is int else count
        if got is UNSET or got not in counts:
            words = counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            got = None if got is UNSET else got
            raise ValueError(f"sample {name}: {key} is {got}, expected {words}")


def payload(meta: AnswerMeta, key: str, name: str) -> str | bytes | memoryview:
    """Return a string of base64; raises ValueError where the answer has none."""
    value = getattr(meta, key)
    if not isinstance(value, ROUTE_PAYLOADS):
        flag = f"--enable-return-{key.replace('_', '-')}"
        raise ValueError(
            f"sample {name}: the answer carries no {key}; is the server started with {flag}, and is no"
            " router in front of it?"
        )
    return value


def log_probs_of(
    entries: Sequence[tuple[float | None, int, Any]], token_ids: list[int], name: str
) -> np.ndarray:
    """``[(log_prob, token_id, text), ...]`` -> float32[R]; raises ValueError unless they are of ``token_ids``."""
    if len(entries) != len(token_ids):
        raise ValueError(f"sample {name}: {len(entries)} log-probs for {len(token_ids)} tokens")
    # lists: ids that are equal to those checked need no array of their own
    values, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
    if named != token_ids:
        at = next(i for i, (got, sent) in enumerate(zip(named, token_ids)) if got != sent)
        raise ValueError(
            f"sample {name}: log-prob {at} is of token {named[at]}, token {at} is {token_ids[at]}"
        )
    if None in values:
        raise ValueError(
            f"sample {name}: log-prob {values.index(None)} is None, expected a number (the server's logits are NaN:"
            " a weight of its checkpoint or of an update is not finite)"
        )
    return np.array(values, dtype=np.float32)


def check_base(label: int, name: str) -> None:
    """Raise ValueError unless a server of adapters labels its base as it was started: 0."""
    if label != 0:
        raise ValueError(
            f"sample {name}: the server's base has weight version {label}, expected 0: it was"
            " updated, and --lora-serving adapter sends adapters only"
        )


def version_number(label: str | None, name: str) -> int:
    """Return a weight version that SGLang says as a text of digits."""
    if not label or not (label.isascii() and label.isdigit()) or len(label) > 9:
        raise ValueError(
            f"sample {name}: weight version {str(label)[:100]!r}, expected a number; was the server "
            "started with --weight-version 0?"
        )
    return int(label)


def _versions(spans: Sequence[VersionSpan], response_len: int, name: str) -> np.ndarray:
    """Spans over the output tokens -> int32[R]; raises ValueError unless they cover each token once."""
    versions, end = np.full(response_len, -1, dtype=np.int32), 0
    for span in spans if response_len else ():
        if span.start != end or not end <= span.end <= response_len:
            raise ValueError(
                f"sample {name}: weight_versions {str(spans)[:200]} do not cover {response_len} output"
                " tokens"
            )
        versions[end : span.end] = version_number(span.version, name)
        end = span.end
    if end != response_len:
        raise ValueError(
            f"sample {name}: weight_versions end at {end}, expected {response_len} output tokens"
        )
    return versions


def _check_versions(versions: np.ndarray, request: Request, newest: int | None) -> None:
    """Raise ValueError for a token of other weights than asked for, or of weights that no server was given yet."""
    if not len(versions):
        return
    name, oldest, got = request.name, request.weight_version, np.unique(versions).tolist()
    if oldest is not None and request.exact_version and got != [oldest]:
        raise ValueError(f"sample {name}: weight versions {got}, expected {oldest} only")
    if oldest is not None and (got[0] < oldest or (np.diff(versions) < 0).any()):
        raise ValueError(
            f"sample {name}: weight versions {got}, expected rising ones from {oldest} on"
        )
    if newest is not None and got[-1] > newest:
        raise ValueError(
            f"sample {name}: a token of weight version {got[-1]}, the servers were given {newest} at most"
        )


def _check_end(
    reason: FinishReason, output_ids: np.ndarray, request: Request, ends_at: range | None
) -> None:
    """Raise ValueError for an answer that does not end where its finish_reason says.

    A stop token is the last one, named by the reason.  A ``length`` is the one asked for; SGLang 0.5.23
    gives less where the text comes to ``ends_at``, and then says the length that it gave.
    """
    name, count, max_tokens = request.name, len(output_ids), request.max_new_tokens
    sampling = request.sampling
    if reason.type == "length":
        if reason.length != count:
            raise ValueError(f"sample {name}: finish_reason is {reason}, {count} tokens were sent")
        if count != max_tokens and (
            ends_at is None or len(request.token_ids) + count not in ends_at
        ):
            room = f", and the server has room for a text of {ends_at[-1]}" if ends_at else ""
            raise ValueError(
                f"sample {name}: finish_reason is 'length' after {count} tokens, {max_tokens} were asked"
                f" for{room}"
            )
    stops = () if sampling.ignore_eos else sampling.stop_token_ids
    if reason.type == "stop":
        last = int(output_ids[-1])
        may_end = (*stops, *(() if sampling.ignore_eos else sampling.may_stop_at))
        if reason.matched != last or last not in may_end:
            raise ValueError(
                f"sample {name}: finish_reason is {reason} and the last token {last}, expected one of"
                f" the stop tokens {sorted(may_end)}"
            )
    goes_on = output_ids if reason.type == "length" else output_ids[:-1]
    if len(stops) and (found := np.isin(goes_on, stops)).any():
        at = int(np.argmax(found))
        raise ValueError(
            f"sample {name}: output token {at} is the stop token {int(goes_on[at])}, and"
            f" {count - at - 1} follow, with the finish reason {reason.type!r}"
        )


def _drafts(meta: AnswerMeta, name: str) -> Drafts:
    if meta.spec_verify_ct is UNSET:
        return Drafts()
    expect_counts(meta, name, spec_num_proposed_drafts=_ANY_COUNT)
    proposed = meta.spec_num_proposed_drafts
    expect_counts(meta, name, spec_num_correct_drafts=range(proposed + 1))
    return Drafts(proposed, meta.spec_num_correct_drafts, meta.spec_verify_ct)


def _sampling_mask(
    meta: AnswerMeta, token_ids: np.ndarray, unmasked: np.ndarray, request: Request
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log-probs float32[O] within the sampling mask, its counts int32[O] and ids int32[counts.sum()].

    unmasked: log-probs among all tokens.  None within the mask is below that, and that of one token alone is 0.
    """
    name, vocab_size = request.name, request.sampling.mask_vocab
    kept, within = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    for key, entries in (("mask", kept), ("logprobs", within)):
        if len(entries or ()) != len(token_ids):
            got = "no" if entries is None else len(entries)
            raise ValueError(
                f"sample {name}: output_token_sampling_{key} has {got} rows, expected {len(token_ids)}, one"
                " an output token"
            )
    counts = np.array([len(row) for row in kept or ()], dtype=np.int32)
    ids = np.array([token for row in kept or () for token in row], dtype=np.int64)
    if found := outside_vocabulary(ids, vocab_size):
        raise ValueError(f"sample {name}: sampling mask: {found}")
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
    masked = np.array(within or (), dtype=np.float32)
    if (low := masked < unmasked - 1e-3).any():
        at = int(np.argmax(low))
        raise ValueError(
            f"sample {name}: log-prob {at} within the sampling mask is {masked[at]}, expected at least"
            f" {unmasked[at]}, that among all tokens"
        )
    if (off := (counts == 1) & (np.abs(masked) >= 1e-4)).any():
        at = int(np.argmax(off))
        raise ValueError(f"sample {name}: log-prob {at} is {masked[at]} where one token was kept")
    return masked, counts, ids.astype(np.int32)

"""Join several answers of the engine into one sample: after an abort, and turn by turn.

Pure.  Row t of a sample's routes was computed when token t was the input.  An answer with T
input tokens and O output tokens can hold rows 0..T+O-2, and the request asks for the rows from
``rows_known`` on.  A segment does not compute the row of its own last token: that row is the first
of the next segment.  The first write wins: a row that came with its log-probs is never replaced by
a row that other weights recomputed.  A row that never came stays marked as missing.

While a sample grows, its rows are the parts in ``decoded``, end to end from row 0, and ``routed_experts`` is
empty: it says that rows are recorded, and of which kind.  ``finished`` joins them, once: a join at every
answer would copy all rows of a long conversation again and again.

A prompt of two tokens, of one layer and one expert a token.  The first answer is aborted by an update after token 7;
the second goes on under version 1.  Of five tokens four have rows, and the row of token 7 came with the second:

>>> def answer(tokens, version, rows, rows_start, reason):
...     count, rows = len(tokens), np.array(rows, np.uint8).reshape(-1, 1, 1)
...     versions, log_probs = np.full(count, version, np.int32), np.full(count, -0.5, np.float32)
...     return Segment(np.array(tokens, np.int32), log_probs, versions, rows, rows_start, reason)
>>> prompt = Prompt("data:1", 0, "two tokens", np.array([5, 6], np.int32), label=None)
>>> sample = extend(begin(prompt, sample_id=0, group_id=0), answer([7], 0, [15, 16], 0, "abort"))
>>> rows_known(sample)
2
>>> sample = finished(extend(sample, answer([8, 9], 1, [17, 18], 2, "stop")))
>>> sample.token_ids.tolist(), sample.routed_experts.ravel().tolist()
([5, 6, 7, 8, 9], [15, 16, 17, 18])
>>> sample.loss_mask.astype(int).tolist(), sample.weight_versions.tolist()
([0, 0, 1, 1, 1], [-1, -1, 0, 1, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from r3train.engine.backend import Request, SamplingParams, Segment
from r3train.layout.provenance import classes_of_answer
from r3train.routing import indexer_topk
from r3train.types import Prompt, RolloutSample, RowClass, missing_marker


def begin(prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutSample:
    """Make a sample that holds its prompt only, without rows."""
    token_ids = np.asarray(prompt.token_ids, dtype=np.int32)
    length = len(token_ids)
    return RolloutSample(
        sample_id=sample_id,
        group_id=group_id,
        prompt=prompt,
        token_ids=token_ids,
        prompt_len=length,
        loss_mask=np.zeros(length, dtype=bool),
        rollout_log_probs=np.zeros(length, dtype=np.float32),
        routed_experts=None,
        weight_versions=np.full(length, -1, dtype=np.int32),
        finish_reason="abort",
    )


def rows_known(sample: RolloutSample) -> int:
    """The number of rows that a growing sample holds; the next request asks for the rows after them."""
    first, rows = sample.decoded[-1] if sample.decoded else (0, ())
    return first + len(rows)


def tokens_left(sample: RolloutSample, sampling: SamplingParams) -> int:
    """The number of tokens that may follow; raises ValueError if the prompt fills the context."""
    budget = sampling.response_budget(sample.prompt_len, sample.prompt.prompt_id)
    return budget - sample.response_len


def shortest(*limits: int | None) -> int | None:
    """The smallest of several limits, None if none is given."""
    return min((limit for limit in limits if limit is not None), default=None)


def is_cut(segment: Segment, limit: int | None, left: int) -> bool:
    """True if an answer ended because ``limit`` tokens were asked for, and ``left`` may follow."""
    return segment.finish_reason == "length" and len(segment.token_ids) == limit and left > 0


def next_request(
    sample: RolloutSample,
    sampling: SamplingParams,
    *,
    limit: int | None = None,
    weight_version: int | None = None,
    exact_version: bool = True,
    wants_routes: bool = True,
) -> Request:
    """The request for the rest of a sample, or for at most ``limit`` tokens of it."""
    left = tokens_left(sample, sampling)
    assert left > 0, f"sample {sample.sample_id} has no token left to generate"
    return Request(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt_id=sample.prompt.prompt_id,
        token_ids=sample.token_ids,
        max_new_tokens=left if limit is None else min(left, limit),
        sampling=sampling,
        rows_start=rows_known(sample),
        num_generated=int(sample.loss_mask.sum()),
        weight_version=weight_version,
        exact_version=exact_version,
        wants_routes=wants_routes,
    )


def extend(sample: RolloutSample, segment: Segment) -> RolloutSample:
    """Append an answer to the sample; an empty answer only says whether routes and masks are recorded.

    Raises ValueError naming the sample if only one of the two has routes, if the rows leave a gap,
    and if they do not end just before the last token.
    """
    sample = _with_streams_of(segment, sample)
    if len(segment.token_ids) == 0:
        return replace(sample, finish_reason=segment.finish_reason)
    for name, sample_stream, segment_stream in (
        ("routes", sample.routed_experts, segment.rows),
        ("sampling masks", sample.mask_counts, segment.mask_counts),
        ("choices of its indexer", sample.indexer_topk, segment.indexer_topk),
    ):
        if (sample_stream is None) != (segment_stream is None):
            raise ValueError(
                f"sample {sample.sample_id}: of the sample and its next answer only one has {name}"
            )
    decoded, classes = sample.decoded, sample.row_classes
    decoded_indexer, decoded_masks = sample.decoded_indexer, sample.decoded_masks
    have, counts, ids = rows_known(sample), sample.mask_counts, sample.mask_ids
    if sample.routed_experts is not None:
        _require_rows_after(have, sample, segment)
        # rows that were known already stay as they came the first time
        decoded = (*decoded, (have, segment.rows[have - segment.rows_start :]))
        classes = _classes_with(segment, have, sample)
    if sample.indexer_topk is not None:
        # as with routes: what was known stays, and the answer has all rows after it
        at = max(segment.indexer_start, have)
        decoded_indexer += ((at, segment.indexer_topk[at - segment.indexer_start :]),)
    if counts is not None:
        decoded_masks += ((sample.num_tokens, segment.mask_counts, segment.mask_ids),)
        counts = np.concatenate([counts, segment.mask_counts])
        ids = np.concatenate([ids, segment.mask_ids])
    generated = np.ones(len(segment.token_ids), dtype=bool)
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, segment.token_ids]).astype(np.int32),
        loss_mask=np.concatenate([sample.loss_mask, generated]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, segment.log_probs]),
        weight_versions=np.concatenate([sample.weight_versions, segment.weight_versions]),
        finish_reason=segment.finish_reason,
        num_retractions=sample.num_retractions + segment.num_retractions,
        decoded=decoded,
        row_classes=classes,
        mask_counts=counts,
        mask_ids=ids,
        decoded_masks=decoded_masks,
        decoded_indexer=decoded_indexer,
    )


def _with_streams_of(segment: Segment, sample: RolloutSample) -> RolloutSample:
    """Begin the streams of a sample that its first answer shows; a later answer begins none."""
    known, counts, ids = sample.routed_experts, sample.mask_counts, sample.mask_ids
    chosen, classes = sample.indexer_topk, sample.row_classes
    if not sample.loss_mask.any():
        if known is None and segment.rows is not None:
            known = segment.rows[:0]
        if counts is None and segment.mask_counts is not None:  # the prompt has none
            counts, ids = np.zeros(sample.num_tokens, np.int32), segment.mask_ids[:0]
        if chosen is None and segment.indexer_topk is not None:
            chosen = segment.indexer_topk[:0]
    if classes is None and known is not None:
        classes = np.full(sample.num_tokens, RowClass.FILLED, dtype=np.uint8)
    return replace(
        sample,
        routed_experts=known,
        row_classes=classes,
        mask_counts=counts,
        mask_ids=ids,
        indexer_topk=chosen,
    )


def _require_rows_after(have: int, sample: RolloutSample, segment: Segment) -> None:
    """Raise ValueError unless an answer's rows are of the sample's kind, and all of those after the known ones."""
    known, start = sample.routed_experts, segment.rows_start
    end, num_rows = start + len(segment.rows), sample.num_tokens + len(segment.token_ids) - 1
    if start < 0 or start > have or end != num_rows:
        raise ValueError(
            f"sample {sample.sample_id}: an answer brings rows {start}..{end - 1}, expected all"
            f" after the {have} known ones to {num_rows - 1}"
        )
    if known.shape[1:] != segment.rows.shape[1:] or known.dtype != segment.rows.dtype:
        raise ValueError(
            f"sample {sample.sample_id}: rows {list(segment.rows.shape[1:])} {segment.rows.dtype}"
            f" after rows {list(known.shape[1:])} {known.dtype}"
        )


def _classes_with(segment: Segment, have: int, sample: RolloutSample) -> np.ndarray:
    """The classes of a sample's rows with those that an answer brings after the first ``have``."""
    classes = _with_filled(sample.row_classes, len(segment.token_ids))
    oldest, end = oldest_version(sample), segment.rows_start + len(segment.rows)
    classes[have:end] = classes_of_answer(
        range(have, end),
        num_input=sample.num_tokens,
        cached=segment.cached_tokens,
        again=oldest is not None and oldest < segment.weight_versions[0],
        retracted=segment.num_retractions > 0,
    )
    return classes


def observe(sample: RolloutSample, token_ids: Sequence[int]) -> RolloutSample:
    """Add tokens that the model did not generate: no loss, no log-prob, no version.

    The next answer computes their rows and brings them.
    """
    count = len(token_ids)
    kept = sample.mask_counts
    return replace(
        sample,
        mask_counts=None if kept is None else np.append(kept, np.zeros(count, np.int32)),
        token_ids=np.concatenate([sample.token_ids, np.asarray(token_ids, dtype=np.int32)]),
        loss_mask=np.concatenate([sample.loss_mask, np.zeros(count, dtype=bool)]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, np.zeros(count, np.float32)]),
        weight_versions=np.concatenate([sample.weight_versions, np.full(count, -1, np.int32)]),
        row_classes=_with_filled(sample.row_classes, count),
    )


def _with_filled(classes: np.ndarray | None, count: int) -> np.ndarray | None:
    """The classes of rows with those of ``count`` more tokens, whose rows nobody has computed yet."""
    if classes is None:
        return None
    return np.concatenate([classes, np.full(count, RowClass.FILLED, dtype=np.uint8)])


def classes_until(sample: RolloutSample, end: int) -> np.ndarray | None:
    """The classes of the rows of a sample that is cut to ``end`` tokens: the last token has no row."""
    if sample.row_classes is None:
        return None
    return _with_filled(sample.row_classes[: end - 1], 1)


def indexer_parts_until(sample: RolloutSample, end: int) -> tuple[tuple[int, np.ndarray], ...]:
    """The indexer's choices, as the answers brought them, of a sample that is cut to ``end`` tokens.

    The first part stays, if only to say where the rows begin.
    """
    words = indexer_topk.num_words(end)
    return tuple(
        (at, rows[: max(end - 1 - at, 0), :, :words])
        for i, (at, rows) in enumerate(sample.decoded_indexer)
        if i == 0 or at < end - 1
    )


def cut(sample: RolloutSample, end: int) -> RolloutSample:
    """The first ``end`` tokens of a growing sample, as if nothing had followed: rows of all but the last."""
    kept, ids = sample.mask_counts, sample.mask_ids
    if kept is not None:
        kept = kept[:end]
        ids = sample.mask_ids[: int(kept.sum())]
    masks = []
    for first, counts, part in sample.decoded_masks:
        if first < end:
            counts = counts[: end - first]
            masks.append((first, counts, part[: int(counts.sum())]))
    return replace(
        sample,
        token_ids=sample.token_ids[:end],
        loss_mask=sample.loss_mask[:end],
        rollout_log_probs=sample.rollout_log_probs[:end],
        weight_versions=sample.weight_versions[:end],
        decoded=tuple((at, rows[: end - 1 - at]) for at, rows in sample.decoded if at < end - 1),
        mask_counts=kept,
        mask_ids=ids,
        decoded_masks=tuple(masks),
        decoded_indexer=indexer_parts_until(sample, end),
        row_classes=classes_until(sample, end),
    )


def forked(
    sample: RolloutSample, end: int, token_ids: Sequence[int], *, sample_id: int
) -> RolloutSample:
    """Begin another sample with the first ``end`` tokens of one, and ``token_ids`` after them, as its prompt.

    It keeps the rows, versions and sampling masks of what the model sampled, and none of the loss.
    """
    begun = observe(cut(sample, end), token_ids)
    length = begun.num_tokens
    return replace(
        begun,
        sample_id=sample_id,
        prompt_len=length,
        loss_mask=np.zeros(length, dtype=bool),
        rollout_log_probs=np.zeros(length, dtype=np.float32),
        generation_s=0.0,
        num_retractions=0,
    )


def finished(sample: RolloutSample) -> RolloutSample:
    """Join the rows of a sample that grows no more: one for every token but the last.

    Rows that never came are marked as missing.
    """
    known, num_rows = sample.routed_experts, sample.num_tokens - 1
    if known is None or len(known) == num_rows:
        return sample
    chosen = sample.indexer_topk
    if sample.decoded_indexer:
        topk = sample.decoded_indexer[0][0]
        chosen = indexer_topk.joined(
            sample.decoded_indexer, sample.num_tokens, topk, known.shape[1]
        )
    routes = joined(known, sample.decoded, num_rows)
    return replace(sample, routed_experts=routes, indexer_topk=chosen)


def joined(like: np.ndarray, parts: Sequence[tuple[int, np.ndarray]], num_rows: int) -> np.ndarray:
    """Put parts of rows at their places: ``num_rows`` rows of the kind of ``like``.

    A single part that has them all is returned as it is.  Rows of no part are marked as missing.
    """
    if len(parts) == 1 and len(parts[0][1]) == num_rows:
        return parts[0][1]
    rows = np.full((num_rows, *like.shape[1:]), missing_marker(like.dtype), dtype=like.dtype)
    for first, part in parts:
        rows[first : first + len(part)] = part
    return rows


def oldest_version(sample: RolloutSample) -> int | None:
    """The oldest weight version among the sample's generated tokens, None if there are none."""
    versions = sample.weight_versions[sample.loss_mask]
    return int(versions.min()) if len(versions) else None

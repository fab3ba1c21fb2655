"""Join several answers of the engine into one sample: after an abort, and turn by turn.

Pure.  Row t of a sample's routes was computed when token t was the input.  An answer with T
input tokens and O output tokens can hold rows 0..T+O-2, and the request asks for the rows from
``rows_known`` on.  A segment does not compute the row of its own last token: that row is the first
of the next segment.  The first write wins: a row that came with its log-probs is never replaced by
a row that other weights recomputed.  A row that never came stays marked as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from r3train.engine.backend import Request, SamplingParams, Segment
from r3train.types import Prompt, RolloutSample, missing_marker


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
    """The number of rows that the sample holds; the next request asks for the rows after them."""
    return 0 if sample.routed_experts is None else int(sample.routed_experts.shape[0])


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
    known, counts, ids = sample.routed_experts, sample.mask_counts, sample.mask_ids
    if not sample.loss_mask.any():  # the first answer shows what answers bring
        if known is None and segment.rows is not None:
            known = segment.rows[:0]
        if counts is None and segment.mask_counts is not None:  # the prompt has none
            counts, ids = np.zeros(sample.num_tokens, np.int32), segment.mask_ids[:0]
    if len(segment.token_ids) == 0:
        return replace(
            sample,
            routed_experts=known,
            finish_reason=segment.finish_reason,
            mask_counts=counts,
            mask_ids=ids,
        )
    for name, ours, theirs in (
        ("routes", known, segment.rows),
        ("sampling masks", counts, segment.mask_counts),
    ):
        if (ours is None) != (theirs is None):
            raise ValueError(
                f"sample {sample.sample_id}: of the sample and its next answer only one has {name}"
            )
    generated = np.ones(len(segment.token_ids), dtype=bool)
    rows, decoded, num_rows = None, sample.decoded, sample.num_tokens + len(generated) - 1
    if known is not None:
        start, end = segment.rows_start, segment.rows_start + len(segment.rows)
        if start > len(known) or end != num_rows:
            raise ValueError(
                f"sample {sample.sample_id}: an answer brings rows {start}..{end - 1}, expected all"
                f" after the {len(known)} known ones to {num_rows - 1}"
            )
        rows = merge_rows(
            known, segment.rows, start=start, num_rows=num_rows, sample=str(sample.sample_id)
        )
        # rows that were known already are recorded as they came the first time
        decoded = (*decoded, (len(known), segment.rows[len(known) - start :]))
    decoded_masks = sample.decoded_masks
    if counts is not None:
        decoded_masks += ((sample.num_tokens, segment.mask_counts, segment.mask_ids),)
        counts = np.concatenate([counts, segment.mask_counts])
        ids = np.concatenate([ids, segment.mask_ids])
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, segment.token_ids]).astype(np.int32),
        loss_mask=np.concatenate([sample.loss_mask, generated]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, segment.log_probs]),
        routed_experts=rows,
        weight_versions=np.concatenate([sample.weight_versions, segment.weight_versions]),
        finish_reason=segment.finish_reason,
        num_retractions=sample.num_retractions + segment.num_retractions,
        decoded=decoded,
        mask_counts=counts,
        mask_ids=ids,
        decoded_masks=decoded_masks,
    )


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
    )


def merge_rows(
    known: np.ndarray,
    new: np.ndarray,
    *,
    start: int,
    num_rows: int,
    sample: str,
) -> np.ndarray:
    """Merge rows; the first write wins, and a row in neither array is marked missing.

    known: uint8/uint16 [k, L, K], rows 0..k-1; new: [r, L, K], rows start..start+r-1.  Returns
    rows 0..num_rows-1, [num_rows, L, K]; this is ``new`` itself if it holds them all.
    Raises ValueError for rows of another shape or dtype, and for rows past ``num_rows``.
    """
    if known.shape[1:] != new.shape[1:] or known.dtype != new.dtype:
        raise ValueError(
            f"sample {sample}: rows {list(new.shape[1:])} {new.dtype} after rows "
            f"{list(known.shape[1:])} {known.dtype}"
        )
    if start < 0 or start + len(new) > num_rows or len(known) > num_rows:
        raise ValueError(
            f"sample {sample}: rows 0..{len(known) - 1} and {start}..{start + len(new) - 1}, "
            f"expected none past {num_rows - 1}"
        )
    if len(new) == num_rows and len(known) == 0:
        return new
    rows = np.full((num_rows, *known.shape[1:]), missing_marker(known.dtype), dtype=known.dtype)
    rows[start : start + len(new)] = new
    rows[: len(known)] = known
    return rows


def finished(sample: RolloutSample) -> RolloutSample:
    """Mark the missing rows of an aborted sample: a row for every token but the last."""
    if sample.routed_experts is None or rows_known(sample) == sample.num_tokens - 1:
        return sample
    rows = merge_rows(
        sample.routed_experts,
        sample.routed_experts[:0],
        start=0,
        num_rows=sample.num_tokens - 1,
        sample=str(sample.sample_id),
    )
    return replace(sample, routed_experts=rows)


def oldest_version(sample: RolloutSample) -> int | None:
    """The oldest weight version among the sample's generated tokens, None if there are none."""
    versions = sample.weight_versions[sample.loss_mask]
    return int(versions.min()) if len(versions) else None

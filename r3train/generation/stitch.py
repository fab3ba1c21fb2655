"""One sample from several answers of the engine: rollouts resumed after an abort, and turns.

Pure.  Row t of a sample's routes was computed when token t was the input.  An answer to T tokens
in and O tokens out can hold rows 0..T+O-2; the request asks for those from ``len(rows known)`` on,
so the row of the last token of one segment, which that segment never computed, is the first row of
the next.  The first write wins: a row that came with its log-probs is never replaced by one that
other weights recomputed, and a row that never came stays marked as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from r3train.types import Prompt, RolloutSample, RouteRef, RouteShape, missing_marker


@dataclass(frozen=True, slots=True)
class Segment:
    """What one answer adds; O new tokens, R rows from row ``rows_start`` on."""

    token_ids: np.ndarray  # int32[O]
    log_probs: np.ndarray  # float32[O]
    weight_versions: np.ndarray  # int32[O]
    rows: np.ndarray | RouteRef | None  # uint8/uint16 [R, L, K]
    rows_start: int
    finish_reason: str


def begin(
    prompt: Prompt,
    *,
    sample_id: int,
    group_id: int,
    routes: RouteShape | None,
) -> RolloutSample:
    """A sample that holds its prompt alone, and no row yet.  ``routes`` is None without R3."""
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
        routed_experts=np.zeros((0, *routes.row), dtype=routes.dtype) if routes else None,
        weight_versions=np.full(length, -1, dtype=np.int32),
        finish_reason="abort",
    )


def rows_known(sample: RolloutSample) -> int:
    """How many rows the sample holds already: where the next request's ``start_len`` stands."""
    return 0 if sample.routed_experts is None else int(sample.routed_experts.shape[0])


def extend(sample: RolloutSample, segment: Segment) -> RolloutSample:
    """Add the tokens that the model generated after ``sample``, and their rows.

    A segment without a token changes the finish reason alone.  Raises ValueError naming the sample
    where one side has routes and the other has none, or where the rows run past the tokens.
    """
    if len(segment.token_ids) == 0:
        return replace(sample, finish_reason=segment.finish_reason)
    generated = np.ones(len(segment.token_ids), dtype=bool)
    num_rows = sample.num_tokens + len(generated) - 1
    rows = None
    if (sample.routed_experts is None) != (segment.rows is None):
        raise ValueError(f"sample {sample.sample_id}: routes on one side of a seam alone")
    if sample.routed_experts is not None:
        rows = merge_rows(
            sample.routed_experts,
            segment.rows,
            start=segment.rows_start,
            num_rows=num_rows,
            sample=str(sample.sample_id),
        )
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, segment.token_ids]).astype(np.int32),
        loss_mask=np.concatenate([sample.loss_mask, generated]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, segment.log_probs]),
        routed_experts=rows,
        weight_versions=np.concatenate([sample.weight_versions, segment.weight_versions]),
        finish_reason=segment.finish_reason,
    )


def observe(sample: RolloutSample, token_ids: Sequence[int]) -> RolloutSample:
    """Add tokens that the model did not generate: no loss, no log-prob, no version.

    Their rows come with the next answer, which computes them.
    """
    count = len(token_ids)
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, np.asarray(token_ids, dtype=np.int32)]),
        loss_mask=np.concatenate([sample.loss_mask, np.zeros(count, dtype=bool)]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, np.zeros(count, np.float32)]),
        weight_versions=np.concatenate([sample.weight_versions, np.full(count, -1, np.int32)]),
    )


def merge_rows(
    known: np.ndarray | RouteRef,
    new: np.ndarray | RouteRef,
    *,
    start: int,
    num_rows: int,
    sample: str,
) -> np.ndarray | RouteRef:
    """Rows 0..num_rows-1, first write wins; a row in neither is marked missing.

    known: uint8/uint16 [k, L, K], rows 0..k-1; new: [r, L, K], rows start..start+r-1, both of them
    arrays or both references.  Returns [num_rows, L, K].  Raises ValueError for rows of another shape or dtype, and for rows
    past ``num_rows``: one of the two counts tokens otherwise.
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
    if isinstance(new, RouteRef):
        assert isinstance(known, RouteRef) or len(known) == 0, "rows and references in one sample"
        first = known if isinstance(known, RouteRef) else new[:0]
        rest = new[len(known) - start :] if len(known) > start else new
        end = max(start + len(new), len(known))
        return first.followed_by([max(start - len(known), 0), rest, num_rows - end])
    rows = np.full((num_rows, *known.shape[1:]), missing_marker(known.dtype), dtype=known.dtype)
    rows[start : start + len(new)] = new
    rows[: len(known)] = known
    return rows


def finished(sample: RolloutSample) -> RolloutSample:
    """The sample with a row for every token but the last, missing ones marked (an aborted one)."""
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
    """The oldest weights that generated any of the sample's tokens, None where it has none."""
    versions = sample.weight_versions[sample.loss_mask]
    return int(versions.min()) if len(versions) else None

"""The provenance of route rows: how a server came to each of them, and under which weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3train.types import RolloutSample, RowClass, UNKNOWN_CLASS

# {label of the class: {weight version, -1 where not known: rows}}
RowCounts = dict[str, dict[int, int]]


def classes_of_answer(
    rows: range, *, num_input: int, cached: int, again: bool, retracted: bool
) -> np.ndarray:
    """Name the classes of an answer's rows: uint8[len(rows)].

    rows: their indices in the text.  num_input: tokens that were sent, of which ``cached`` came from the
    cache.  again: older weights had sampled tokens of them.  retracted: the server gave the request up and
    computed it again.

    The cached tokens are counted from the beginning.  A server that finds more of a long text in its cache while it
    computes the text in chunks (SGLang does, if another request brought it meanwhile) says how many, and not where.
    """
    if retracted:
        return np.full(len(rows), RowClass.PREFILLED_AGAIN, dtype=np.uint8)
    classes = np.full(len(rows), RowClass.DECODED, dtype=np.uint8)
    classes[: max(num_input - rows.start, 0)] = (
        RowClass.PREFILLED_AGAIN if again else RowClass.PREFILLED
    )
    classes[: max(cached - rows.start, 0)] = RowClass.CACHED
    return classes


def classes_of_tokens(sample: RolloutSample) -> np.ndarray:
    """The class of each token's row, uint8[T]; UNKNOWN_CLASS where the sample has none.

    Raises ValueError naming the sample whose classes are misshapen.
    """
    classes = sample.row_classes
    if classes is None:
        return np.full(sample.num_tokens, UNKNOWN_CLASS, dtype=np.uint8)
    if classes.shape != (sample.num_tokens,) or classes.dtype != np.uint8:
        raise ValueError(
            f"sample {sample.sample_id} (prompt {sample.prompt.prompt_id}) has classes of rows"
            f" {classes.shape} {classes.dtype}, expected {(sample.num_tokens,)} uint8"
        )
    if classes.max() > max(RowClass):
        raise ValueError(
            f"sample {sample.sample_id} (prompt {sample.prompt.prompt_id}): row"
            f" {int(classes.argmax())} has class {classes.max()}, expected 0 to {max(RowClass)}"
        )
    return classes


def count_rows(
    samples: Sequence[RolloutSample], versions: Sequence[np.ndarray]
) -> RowCounts | None:
    """Count the rows of samples by class and weight version; None if a sample's classes are not known.

    versions: of each sample's rows, int32[T], see ``layout.microbatch.row_versions``.
    """
    if any(sample.row_classes is None for sample in samples):
        return None
    classes = np.concatenate([classes_of_tokens(s) for s in samples] or [np.zeros(0, np.uint8)])
    row_versions = np.concatenate([*versions] or [np.zeros(0, np.int32)])
    counts: RowCounts = {row_class.label: {} for row_class in RowClass}
    pairs = np.stack([classes.astype(np.int64), row_versions.astype(np.int64)])
    found, amounts = np.unique(pairs, axis=1, return_counts=True)
    for (row_class, version), amount in zip(found.T.tolist(), amounts.tolist()):
        counts[RowClass(row_class).label][version] = amount
    return counts

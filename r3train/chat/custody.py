"""Custody of an agent's tokens: what the policy sampled and the agent got is trained, exactly once, and nothing else.

A session's ledger has one entry for each call that was delivered: (sample id, first token, end, crc32 of the
tokens up to the end).  It is written when an answer is complete, and is compared with the samples as they are
trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from r3train.types import missing_marker, RolloutSample

Entry = Sequence[int]


def entry(sample: RolloutSample, start: int) -> tuple[int, int, int, int]:
    """The ledger's entry for an answer, from token ``start`` to the sample's end."""
    return sample.sample_id, start, sample.num_tokens, _checksum(sample.token_ids)


def problems(samples: Sequence[RolloutSample], ledger: Sequence[Entry]) -> Iterator[str]:
    """Yield what is wrong with a session's samples, each in a line that names its sample.

    Each call's request and answer must stand at the beginning of its sample, the tokens with loss must be those of
    the calls, each of one call, and every token but the last must have a whole row where routes are recorded.
    """
    of_id = {sample.sample_id: sample for sample in samples}
    if len(of_id) < len(samples):
        yield f"samples {[sample.sample_id for sample in samples]}: two have one id"
    due = {number: np.zeros(sample.num_tokens, bool) for number, sample in of_id.items()}
    for number, start, end, checksum in ledger:
        if number not in of_id:
            yield f"sample {number}: is not there, and {end - start} tokens were sampled for it"
        elif _checksum(of_id[number].token_ids[:end]) != checksum:
            yield f"sample {number}: does not begin with the request and answer of {end} tokens"
        elif due[number][start:end].any():
            yield f"sample {number}: two calls sampled tokens between {start} and {end}"
        else:
            due[number][start:end] = True
    for number, sample in of_id.items():
        if wrong := int((due[number] != sample.loss_mask).sum()):
            yield (
                f"sample {number}: {int(due[number].sum())} tokens were sampled and delivered, "
                f"{int(sample.loss_mask.sum())} have loss, {wrong} differ"
            )
        yield from _row_problems(sample)


def _row_problems(sample: RolloutSample) -> Iterator[str]:
    rows = sample.routed_experts
    if rows is None:
        return
    if len(rows) != sample.num_tokens - 1:
        yield f"sample {sample.sample_id}: {len(rows)} rows for {sample.num_tokens} tokens"
    missing = (rows == missing_marker(rows.dtype)).reshape(len(rows), -1).all(axis=1)
    if missing.any():
        yield f"sample {sample.sample_id}: {int(missing.sum())} of {len(rows)} rows are missing"


def _checksum(token_ids: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(token_ids, dtype=np.int32))

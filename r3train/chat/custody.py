"""Custody of an agent's tokens: what the policy sampled and the agent got is trained, exactly once, and nothing else.

A session's ledger has one entry for each call that was delivered: (sample id, first token, end, crc32 of the
tokens up to the end).  It is written when an answer is complete, and is compared with the samples as they are
trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.types import Amount, missing_marker, RolloutSample

Entry = Sequence[int]
Checksum = Annotated[int, Meta(ge=-1, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class CustodySample:
    """A sample of a session as it is trained.

    with_loss: runs of tokens with loss, (first, end) each.  rows_lacking: rows without a single recorded slot, and
    those that are not there; 0 where no routes are recorded.
    """

    sample_id: Amount
    num_tokens: Amount
    with_loss: list[tuple[Amount, Amount]]
    rows_lacking: Amount


@dataclass(frozen=True, slots=True)
class CustodyCall:
    """A call that was delivered: its sample, its tokens, and the crc32 of all tokens up to its end.

    sampled: as the answer came; trained: as the sample has them, -1 where there is no such sample.
    """

    sample_id: Amount
    first: Amount
    end: Amount
    sampled: Checksum
    trained: Checksum


@dataclass(frozen=True, slots=True)
class SessionCustody:
    """All that the custody of one session is judged by."""

    session: Amount  # id of its trajectory
    calls: list[CustodyCall]
    samples: list[CustodySample]

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled and delivered."""
        return sum(call.end - call.first for call in self.calls)


def entry(sample: RolloutSample, start: int) -> tuple[int, int, int, int]:
    """The ledger's entry for an answer, from token ``start`` to the sample's end."""
    return sample.sample_id, start, sample.num_tokens, _checksum(sample.token_ids)


def custody_of(
    session: int, samples: Sequence[RolloutSample], ledger: Sequence[Entry]
) -> SessionCustody:
    """Hold a session's samples against its ledger."""
    of_id = {sample.sample_id: sample for sample in samples}
    calls = []
    for number, first, end, checksum in ledger:
        sample = of_id.get(number)
        trained = -1 if sample is None else _checksum(sample.token_ids[:end])
        calls.append(CustodyCall(number, first, end, checksum, trained))
    return SessionCustody(session, calls, [_as_trained(sample) for sample in samples])


def custody_of_samples(samples: Sequence[RolloutSample]) -> list[SessionCustody]:
    """The custody of each session in a batch; its last sample has the ledger.  Samples of no session are left out."""
    found = []
    for session, steps in groupby(samples, key=lambda sample: sample.trajectory_id):
        steps = list(steps)
        if steps[-1].custody is not None:
            found.append(custody_of(session, steps, steps[-1].custody))
    return found


def problems(custody: SessionCustody) -> Iterator[str]:
    """Yield what is wrong, each in a line that names its sample.

    Each call's request and answer must stand at the beginning of its sample, the tokens with loss must be those of
    the calls, each of one call, and every token but the last must have a row where routes are recorded.
    """
    due: dict[int, list[tuple[int, int]]] = {sample.sample_id: [] for sample in custody.samples}
    if len(due) < len(custody.samples):
        yield f"session {custody.session}: two of its samples have one id"
    for call in custody.calls:
        name = f"sample {call.sample_id}"
        if call.sample_id not in due:
            yield f"{name} is not there, and {call.end - call.first} tokens were sampled for it"
            continue
        if call.trained != call.sampled:
            yield f"{name} does not begin with the {call.end} tokens of a call's request and answer"
        if any(call.first < end and first < call.end for first, end in due[call.sample_id]):
            yield f"{name}: two calls sampled tokens between {call.first} and {call.end}"
        due[call.sample_id].append((call.first, call.end))
    for sample in custody.samples:
        expected = sorted(due[sample.sample_id])
        if _joined(expected) != _joined(sample.with_loss):
            yield (
                f"sample {sample.sample_id}: tokens {_shown(expected)} were sampled and delivered, "
                f"{_shown(sample.with_loss)} have loss"
            )
        if sample.rows_lacking:
            yield f"sample {sample.sample_id}: {sample.rows_lacking} rows are not there"


def _as_trained(sample: RolloutSample) -> CustodySample:
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0, append=0))
    runs = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    return CustodySample(sample.sample_id, sample.num_tokens, runs, _rows_lacking(sample))


def _rows_lacking(sample: RolloutSample) -> int:
    rows = sample.routed_experts
    if rows is None:
        return 0
    marker = missing_marker(rows.dtype)
    # few rows, if any, lack their first slot: to look at all slots of all rows would take as long as to join them
    lacking = rows[rows[:, 0, 0] == marker]
    missing = (lacking == marker).all(axis=(1, 2))
    return abs(sample.num_tokens - 1 - len(rows)) + int(missing.sum())


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs in order, those that adjoin as one."""
    made: list[tuple[int, int]] = []
    for first, end in runs:
        if made and made[-1][1] == first:
            made[-1] = (made[-1][0], end)
        else:
            made.append((first, end))
    return made


def _shown(runs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{first}..{end - 1}" for first, end in runs[:8]) or "none"


def _checksum(token_ids: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(token_ids, dtype=np.int32))

"""The token ledger of an agent's session, by which custody is judged (proof/custody_verdict.py).

Custody: what the policy sampled and the agent got is trained exactly once, and nothing else is.  The ledger has one
entry for each delivered call: (sample id, first token, end, crc32 of the tokens up to the end, 1 if it was cut at its
longest length, else 0).  It is written when an answer is complete, and is compared with the samples as they are
trained.  --mask-truncated takes the loss of the answers that were cut, and of no others.

Example: call 1 samples tokens 6..9 of sample 640.  Call 2 goes on from there and samples 12..14.  The ledger is
[(640, 6, 10, crc32 of tokens 0..9, 0), (640, 12, 15, crc32 of tokens 0..14, 0)], and sample 640 must have its loss on
tokens 6..9 and 12..14.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

import numpy as np
from msgspec import Meta

from r3train.types import Amount, missing_marker, RolloutSample

LedgerEntry = Sequence[int]  # ledgers of earlier versions do not say whether a call was cut
Checksum = Annotated[int, Meta(ge=-1, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample of a session as it is trained.

    with_loss: runs of tokens with loss, (first, end) each.  rows_lacking: rows without a single recorded slot, and
    those that are not there; 0 where no routes are recorded.
    """

    sample_id: Amount
    num_tokens: Amount
    with_loss: list[tuple[Amount, Amount]]
    rows_lacking: Amount


@dataclass(frozen=True, slots=True)
class DeliveredCall:
    """A call that was delivered: its sample, its tokens, and the crc32 of all tokens up to its end.

    sampled: as the answer came; trained: as the sample has them, -1 where there is no such sample.  masked: it was cut,
    and --mask-truncated took its loss.
    """

    sample_id: Amount
    first: Amount
    end: Amount
    sampled: Checksum
    trained: Checksum
    masked: bool = False


@dataclass(frozen=True, slots=True)
class SessionLedger:
    """A session's delivered calls and its samples as they are trained: all that custody is judged by."""

    session: Amount  # id of its trajectory
    calls: list[DeliveredCall]
    samples: list[TrainedSample]

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled and delivered."""
        return sum(call.end - call.first for call in self.calls)


def ledger_entry(sample: RolloutSample, start: int) -> tuple[int, int, int, int, int]:
    """The ledger's entry for an answer, from token ``start`` to the sample's end."""
    is_cut = int(sample.finish_reason == "length")
    return sample.sample_id, start, sample.num_tokens, _checksum(sample.token_ids), is_cut


def without_cut_answers(samples: Sequence[RolloutSample]) -> list[RolloutSample]:
    """Take the loss of the answers of a session that were cut; the session's last sample holds its ledger."""
    masks = {sample.sample_id: sample.loss_mask.copy() for sample in samples}
    for sample_id, first, end, _, *is_cut in samples[-1].token_ledger or ():
        if any(is_cut):
            masks[sample_id][first:end] = False
    return [replace(sample, loss_mask=masks[sample.sample_id]) for sample in samples]


def session_ledger(
    session: int,
    samples: Sequence[RolloutSample],
    ledger: Sequence[LedgerEntry],
    mask_truncated: bool = False,
) -> SessionLedger:
    """Put a session's samples next to the entries of its ledger."""
    samples_by_id = {sample.sample_id: sample for sample in samples}
    calls = []
    for sample_id, first, end, checksum, *is_cut in ledger:
        sample = samples_by_id.get(sample_id)
        trained = -1 if sample is None else _checksum(sample.token_ids[:end])
        masked = mask_truncated and any(is_cut)
        calls.append(DeliveredCall(sample_id, first, end, checksum, trained, masked))
    return SessionLedger(session, calls, [_as_trained(sample) for sample in samples])


def session_ledgers(
    samples: Sequence[RolloutSample], mask_truncated: bool = False
) -> list[SessionLedger]:
    """Return each session of a batch: its last sample holds the ledger.  Samples of no session are left out."""
    found = []
    for session, steps in groupby(samples, key=lambda sample: sample.trajectory_id):
        steps = list(steps)
        if steps[-1].token_ledger is not None:
            ledger = steps[-1].token_ledger
            found.append(session_ledger(session, steps, ledger, mask_truncated))
    return found


def ledger_problems(ledger: SessionLedger) -> Iterator[str]:
    """Yield what is wrong, each in a line that names its sample.

    Each call's request and answer must stand at the beginning of its sample, the tokens with loss must be those of
    the calls that are not masked, each of one call, and every token but the last must have a row where routes are
    recorded.
    """
    due: dict[int, list[tuple[int, int]]] = {sample.sample_id: [] for sample in ledger.samples}
    masked = {(call.sample_id, call.first, call.end) for call in ledger.calls if call.masked}
    if len(due) < len(ledger.samples):
        yield f"session {ledger.session}: two of its samples have one id"
    for call in ledger.calls:
        name = f"sample {call.sample_id}"
        if call.sample_id not in due:
            yield f"{name} is not there, and {call.end - call.first} tokens were sampled for it"
            continue
        if call.trained != call.sampled:
            yield f"{name} does not begin with the {call.end} tokens of a call's request and answer"
        if any(call.first < end and first < call.end for first, end in due[call.sample_id]):
            yield f"{name}: two calls sampled tokens between {call.first} and {call.end}"
        due[call.sample_id].append((call.first, call.end))
    for sample in ledger.samples:
        name = sample.sample_id
        expected = sorted(run for run in due[name] if (name, *run) not in masked)
        if _joined(expected) != _joined(sample.with_loss):
            yield (
                f"sample {name}: tokens {_shown(expected)} were sampled and delivered, "
                f"{_shown(sample.with_loss)} have loss"
            )
        if sample.rows_lacking:
            yield f"sample {name}: {sample.rows_lacking} rows are not there"


def _as_trained(sample: RolloutSample) -> TrainedSample:
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0, append=0))
    runs = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    return TrainedSample(sample.sample_id, sample.num_tokens, runs, _rows_lacking(sample))


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

"""WEIGHTS: after every update, before generation goes on, servers' own checksums show no fault of their tensors.

SGLang hashes the bytes of every parameter and persistent buffer that it holds.  Four faults are told by these, exactly and
in every dtype; rounding cannot make any of them:

    SENT     a server holds other tensors than those of a second export, which it has read from disk: these are named
    SAME     a server holds bit by bit what it held after an earlier update, although other weights were sent since
    RESTART  a server holds bit by bit what it was started with, although an update has changed that before
    UNLIKE   servers of one layout hold other tensors than one another: these are named

The sum of the words that were sent, as servers store them, tells whether an update brought other weights, also where
rounding hides it; servers hold other layouts, so it is never compared with their checksums.
One tensor that the only server kept is told by SENT alone, which is read with --rollout-weights fp8: there rounding hides
what canaries find elsewhere.  An update exports every eighth layer again, so that eight updates compare all; of a
large model fewer layers.  (``--check-weight-update-equal`` exports all, in every dtype.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from r3train.types import Amount

Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,64}\Z")]
_NAMED = 8


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """Weights of one server after one update; a line of ``evidence/weights.jsonl``.

    step: the weight version, which is the rollout that these weights train.  sent: the sum of the words that were sent, ""
    of what servers were started with; tensors_sent: their number.  layout: of a server, alike on servers that hold the same
    tensors.  held: the hash of a server's checksums.  unlike: tensors that the first server of its layout holds otherwise.
    compared: tensors of the second export, 0 without one.  other: what the server held otherwise.
    """

    step: Amount
    server: Amount
    sent: Hex
    tensors_sent: Amount
    layout: Hex
    tensors: Amount
    held: Hex
    unlike: list[str]
    compared: Amount = 0
    other: list[str] = field(default_factory=list)


def weights_records(
    version: int,
    sent: tuple[str, int],
    held: Mapping[int, dict[str, str]],
    layouts: Mapping[int, str],
    compared: int = 0,
    held_otherwise: Mapping[int, Sequence[str]] | None = None,
) -> list[WeightsRecord]:
    """The records of an update.

    held: checksums of each server, by the tensor's name; layouts: of each.  compared: tensors of the second export; held_otherwise:
    of these, the names that each server held otherwise.
    """
    first: dict[str, dict[str, str]] = {}
    records = []
    for server, checksums in held.items():
        names = sorted(checksums)
        layout = _hash([layouts[server]])
        like = first.setdefault(layout, checksums)
        records.append(
            WeightsRecord(
                step=version,
                server=server,
                sent=sent[0],
                tensors_sent=sent[1],
                layout=layout,
                tensors=len(names),
                held=_hash([f"{name} {checksums[name]}" for name in names]),
                unlike=sorted({name for name, _ in checksums.items() ^ like.items()})[:_NAMED],
                compared=compared,
                other=list(held_otherwise[server][:_NAMED]) if held_otherwise else [],
            )
        )
    return records


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(eq=False)
class WeightsHistory:
    """Weights that every server of a start held after its updates."""

    # by server: {hash: (weight version, (sum, tensors) that were sent)}
    _held: dict[int, dict[str, tuple[int, tuple[str, int]]]] = field(default_factory=dict)
    _compares: bool = False

    def judge(self, records: Sequence[WeightsRecord]) -> list[str]:
        """Take the records of an update; returns a line for each fault."""
        found = []
        first: dict[str, WeightsRecord] = {}
        for record in records:
            place = f"server {record.server}, weight version {record.step}"
            self._compares |= record.compared > 0
            if self._compares and record.sent and not record.compared:
                found.append(f"SENT: {place}: no second export was compared")
            if record.other:
                names = ", ".join(record.other)
                found.append(f"SENT: {place}: {names} are not those of a second export")
            held = self._held.setdefault(record.server, {})
            sent = record.sent, record.tensors_sent
            if earlier := held.get(record.held):
                version, sent_before = earlier
                if not sent_before[0] and record.sent:
                    if len(held) > 1:
                        found.append(f"RESTART: {place}: it holds all that it was started with")
                elif sent_before != sent and sent_before[1] == sent[1]:
                    text = f"it holds all {record.tensors} tensors of weight version {version}"
                    found.append(f"SAME: {place}: {text}, and others were sent since")
            held.setdefault(record.held, (record.step, sent))
            like = first.setdefault(record.layout, record)
            if record.held != like.held:
                names = ", ".join(record.unlike)
                found.append(f"UNLIKE: {place}: {names} are not those of server {like.server}")
        return found

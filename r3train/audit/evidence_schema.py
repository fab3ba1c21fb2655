"""The lines of a run's evidence files: declared once, and refused by the schema where they are damaged.

``rank_NNNNN.jsonl`` and its parts hold a ``RecordLine`` a router call or a sum of calls, ``steps.jsonl`` a ``StepLine`` a step,
``rechecked.jsonl`` a ``RecheckLine`` a part of a sample that its server rechecked, ``custody.jsonl`` a ``CustodyLine`` a
session of an agent, ``served.jsonl`` a ``ServedLine`` a server and judged update, ``weights.jsonl`` a
``WeightsLine`` a server and update.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from r3train.config.files import bounded_lines, open_regular
from r3train.data.rotated_files import parts_of
from r3train.proof.custody_verdict import CustodyRecord
from r3train.proof.step_verdict import (
    Custody,
    EVIDENCE_VERSION,
    Failure,
    Recheck,
    Served,
    STAGES,
    StepExpectation,
)
from r3train.proof.recheck_verdict import RecheckRecord
from r3train.proof.served_verdict import ServedRecord
from r3train.proof.suspicion import Statistic
from r3train.proof.weights_verdict import WeightsRecord
from r3train.types import (
    Amount,
    Fingerprint,
    INDEXER,
    MOST_EXPERTS,
    ReplayEvidence,
    ReplayPass,
    ROUTES,
)

_HEX = re.compile(r"0x[0-9a-f]{1,16}", re.ASCII)
_PLACE = re.compile(r" - at `\$\.([\w/]+)`$")
# The start of the run that wrote the line; starts are named so that they sort as they began.
Attempt = Annotated[str, Meta(max_length=100)]
# One time that a step was trained: the start and the step.
Trained = tuple[str, int]
_LineT = TypeVar("_LineT")


class EvidenceError(ValueError):
    """A line or a file of a run that cannot be what a run writes; names the file and the line."""


@dataclass(frozen=True, slots=True)
class RecordLine(ReplayEvidence):
    """One line of ``rank_NNNNN.jsonl``: router calls, and the start of the run that made them."""

    attempt: Attempt = ""


@dataclass(frozen=True, slots=True)
class RecheckLine(RecheckRecord):
    """One line of ``rechecked.jsonl``: a comparison, and the start of the run that made it."""

    attempt: Attempt = ""


@dataclass(frozen=True, slots=True)
class CustodyLine(CustodyRecord):
    """One line of ``custody.jsonl``: a session of an agent, and the start of the run that trained it."""

    attempt: Attempt = ""


@dataclass(frozen=True, slots=True)
class ServedLine(ServedRecord):
    """One line of ``served.jsonl``: the canaries on a server after an update, and the start of the run that read them."""

    attempt: Attempt = ""


@dataclass(frozen=True, slots=True)
class WeightsLine(WeightsRecord):
    """One line of ``weights.jsonl``: what a server held after an update, and the start of the run that asked it."""

    attempt: Attempt = ""


class StepLine(StepExpectation, frozen=True, kw_only=True):
    """One line of ``steps.jsonl``: the run's own verdict on a step, and all that it was judged by."""

    version: int
    attempt: Attempt = ""
    passed: bool
    verdict: Literal["passed", "suspect", "failed"]
    passes: Annotated[list[ReplayPass], Meta(min_length=1)]
    world_size: Annotated[int, Meta(ge=1, le=1 << 17)]
    num_experts: Annotated[int, Meta(ge=1, le=MOST_EXPERTS)]
    topk: Annotated[int, Meta(ge=1)]
    mismatch_threshold: Annotated[float, Meta(ge=0, le=1)]
    suspect_limit: Annotated[float, Meta(ge=0)]
    calibrating: Annotated[int, Meta(ge=0, le=1000)]
    check_interval: Annotated[int, Meta(ge=1)] = 1
    counts: dict[str, int]
    agreement: dict[str, float]
    statistics: list[Statistic]
    failures: list[Failure]
    threshold_error: str | None
    stale_warning: str | None
    recheck: Recheck | None = None
    custody: Custody | None = None
    served: Served | None = None
    held: Amount | None = None

    def __post_init__(self) -> None:
        if self.topk > self.num_experts:
            raise ValueError(
                f"topk is {self.topk}, expected at most {self.num_experts}, the experts"
            )
        if ROUTES not in self.streams:
            raise ValueError("streams has no routes")
        for name, stream in self.streams.items():
            layers, passes = set(stream.fingerprints), set(self.passes)
            keys = {
                "calls": (stream.calls, passes),
                "rows_current": (stream.rows_current, passes),
                "rows_replayed": (stream.rows_replayed, layers),
                "rows_filled": (stream.rows_filled, layers),
            }
            for field, (values, expected) in keys.items():
                if set(values) != expected:
                    text = f"is of {sorted(values)}, expected {sorted(expected)}"
                    raise ValueError(f"streams.{name}.{field} {text}")
            for stages in stream.calls.values():
                if set(stages) != set(STAGES):
                    text = f"is of {sorted(stages)}, expected {sorted(STAGES)}"
                    raise ValueError(f"streams.{name}.calls {text}")
                if unknown := {layer for calls in stages.values() for layer in calls} - layers:
                    text = f"has layers {sorted(unknown)} without fingerprint"
                    raise ValueError(f"streams.{name}.calls {text}")
            if name == INDEXER and stream.rows_without_choice is None:
                raise ValueError(f"streams.{name}.rows_without_choice is missing")


class MetricsLine(msgspec.Struct, frozen=True):
    """One line of ``metrics.jsonl``, as far as the proof reads it."""

    step: Annotated[int, Meta(ge=0, le=1 << 40)]
    passed: bool | int | None = msgspec.field(name="r3/passed", default=None)


class _Versioned(msgspec.Struct):
    version: int = 1  # which its first lines do not name


def _fingerprint(kind: type, value: Any) -> Any:
    if kind is not Fingerprint or not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"Expected 64 bits in hexadecimal (0x...), got {value!r:.60}")
    return Fingerprint(value, 16)


RECORDS = msgspec.json.Decoder(RecordLine, dec_hook=_fingerprint)
RECHECKS = msgspec.json.Decoder(RecheckLine, dec_hook=_fingerprint)
CANARIES = msgspec.json.Decoder(ServedLine)
WEIGHTS = msgspec.json.Decoder(WeightsLine)
SESSIONS = msgspec.json.Decoder(CustodyLine)
STEPS = msgspec.json.Decoder(StepLine, dec_hook=_fingerprint)
METRICS = msgspec.json.Decoder(MetricsLine)


def read_lines(
    path: Path, decoder: msgspec.json.Decoder[_LineT], file: BinaryIO | None = None
) -> Iterator[_LineT]:
    """Yield the lines of a file or of a compressed part.

    A last line without its end, which a writer was stopped in or is at, is left out; a part has none.
    file: an open one, where the name may be another file's by now.  Raises EvidenceError for any other line
    that is refused, and for what cannot be read.
    """
    number, compressed = 0, path.suffix == ".gz"
    try:
        with file or open_regular(path) as raw:
            lines = gzip.GzipFile(fileobj=raw) if compressed else raw
            for number, line in enumerate(bounded_lines(lines, path), start=1):
                if line.endswith(b"\n"):
                    yield _decoded(decoder, line)
                elif compressed:
                    raise ValueError("the part ends within it")
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path.name}:{number}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise EvidenceError(f"{path.name}: cannot be read: {reason}") from None


def _decoded(decoder: msgspec.json.Decoder[_LineT], line: bytes) -> _LineT:
    try:
        if decoder is STEPS:
            version = msgspec.json.decode(line, type=_Versioned).version
            if version != EVIDENCE_VERSION:
                text = f"evidence version {version}, expected {EVIDENCE_VERSION}"
                raise ValueError(f"{text}: judge it with the release that wrote it")
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        text, place = str(error), _PLACE.search(str(error))
        if place is not None and ", got " not in text and place[1] in (line := json.loads(line)):
            text += f", got {line[place[1]]!r:.60}"
        raise ValueError(text) from None


class StepReader(Generic[_LineT]):
    """The records of a file and its parts, of one trained step after the other; at most one file is open.

    A running job may make a part of the file meanwhile: it is opened at once, and read under any name.
    """

    def __init__(self, path: Path, decoder: msgspec.json.Decoder[_LineT]):
        self.name = path.name
        self._groups = groupby(
            _lines_of_all_parts(path, decoder), lambda line: (line.attempt, line.step)
        )
        self._next: tuple[Trained, Iterator[_LineT]] | None = next(self._groups, None)

    def until(self, place: int, place_of: dict[Trained, int]) -> Iterator[tuple[int, _LineT]]:
        """Yield the records up to the first of a verdict after ``place``, each with its verdict's place.

        place_of: the places of the verdicts in their order, from 1.  0 for a record without a verdict.
        """
        while self._next is not None and (line_place := place_of.get(self._next[0], 0)) <= place:
            yield from ((line_place, line) for line in self._next[1])
            self._next = next(self._groups, None)


def _lines_of_all_parts(path: Path, decoder: msgspec.json.Decoder[_LineT]) -> Iterator[_LineT]:
    while True:
        parts = [part for part in parts_of(path) if part != path]
        try:
            latest = open_regular(path)
        except FileNotFoundError:
            latest = None
        except OSError as error:
            raise EvidenceError(f"{path.name}: cannot be read: {error.strerror}") from None
        if parts == [part for part in parts_of(path) if part != path]:
            break
        if latest is not None:  # a part was made in between
            latest.close()
    for part in parts:
        whole = part if part.exists() else part.with_name(f"{part.name}.gz")  # compressed since
        yield from read_lines(whole, decoder)
    if latest is not None:
        yield from read_lines(path, decoder, latest)

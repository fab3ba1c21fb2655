"""The lines of a run's evidence files: declared once, and refused by the schema where they are damaged.

``rank_NNNNN.jsonl`` and its parts hold a ``RecordLine`` a router call or a sum of calls, ``steps.jsonl`` a ``StepLine`` a step,
``rechecked.jsonl`` a ``RecheckLine`` a part of a sample that its server rechecked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from r3train.data.rotated_files import PartError, PartLines
from r3train.proof.judge import COUNTS, Failure, LATER, SAMPLING_MASK, StepExpectation
from r3train.proof.recheck_verdict import RecheckRecord
from r3train.types import Amount, Fingerprint, ReplayEvidence, ReplayPass

# A failed step of 4096 ranks with 100 layers takes some ten MB.
_MAX_LINE = 64 << 20
_HEX = re.compile(r"0x[0-9a-f]{1,16}", re.ASCII)
_PLACE = re.compile(r" - at `\$\.([\w/]+)`$")
# The start of the run that wrote the line; starts are named so that they sort as they began.
Attempt = Annotated[str, Meta(max_length=100)]
_LineT = TypeVar("_LineT")


@dataclass(frozen=True, slots=True)
class RecordLine(ReplayEvidence):
    """One line of ``rank_NNNNN.jsonl``: router calls, and the start of the run that made them."""

    attempt: Attempt = ""

    def __post_init__(self) -> None:
        if len({getattr(self, name) is None for name in LATER}) > 1:
            raise ValueError(f"{', '.join(LATER)}: give all of them or none")


@dataclass(frozen=True, slots=True)
class RecheckLine(RecheckRecord):
    """One line of ``rechecked.jsonl``: a comparison, and the start of the run that made it."""

    attempt: Attempt = ""


class SamplingLine(msgspec.Struct, frozen=True):
    """The run's own verdict on a step's comparisons, in the step's line."""

    verdict: Literal["passed", "failed", "no evidence"]
    parts: Amount
    missed: Amount
    failures: list[Failure]


_Count = Annotated[int, Meta(ge=0)]
Counts = msgspec.defstruct(
    "Counts",
    [
        (name, _Count | None, None) if name in LATER else (name, _Count)
        for name in ("num_calls", "num_calls_expected", *COUNTS)
    ],
    frozen=True,
)


class StepLine(StepExpectation, frozen=True, kw_only=True):
    """One line of ``steps.jsonl``: the run's own verdict on a step, and all that it was judged by."""

    attempt: Attempt = ""
    passed: bool
    passes: Annotated[list[ReplayPass], Meta(min_length=1)]
    world_size: Annotated[int, Meta(ge=1, le=1 << 17)]
    num_experts: Annotated[int, Meta(ge=1, le=65535)]
    topk: Annotated[int, Meta(ge=1)]
    mismatch_threshold: Annotated[float, Meta(ge=0, le=1)]
    check_interval: Annotated[int, Meta(ge=1)] = 1
    counts: Counts
    agreement: dict[str, float]
    failures: list[Failure]
    threshold_error: str | None
    stale_warning: str | None = None
    sampling: SamplingLine | None = None

    def __post_init__(self) -> None:
        if self.topk > self.num_experts:
            raise ValueError(
                f"topk is {self.topk}, expected at most {self.num_experts}, the experts"
            )
        layers = self.expected_fingerprints.keys()
        for name in ("expected_rows_replayed", "expected_rows_filled"):
            if getattr(self, name).keys() != layers:
                raise ValueError(f"{name} has not the layers of expected_fingerprints")
        if sorted(self.expected_calls) != sorted(self.passes):
            raise ValueError(f"expected_calls has not the passes {self.passes}")
        current = self.expected_rows_current
        for name in ("expected_rows_current", "expected_masks_current"):
            if (rows := getattr(self, name)) is not None and sorted(rows) != sorted(self.passes):
                raise ValueError(f"{name} has not the passes {self.passes}")
        if any(SAMPLING_MASK in of for of in self.expected_calls.values()):
            if self.expected_masks_current is None:
                raise ValueError("expected_masks_current is missing: sampling masks were replayed")
        later = (self.keep_score_ratio, *(getattr(self.counts, name) for name in LATER))
        if {value is None for value in later} != {current is None}:
            raise ValueError(
                f"expected_rows_current, keep_score_ratio, counts of {', '.join(LATER)}: give all of them or none"
            )
        for stages in self.expected_calls.values():
            routers = stages.keys() - {SAMPLING_MASK}
            if len(routers) != 2 or any(of.keys() - layers for of in stages.values()):
                raise ValueError(
                    "expected_calls has not both stages, or layers without fingerprint"
                )
        untrue = self.sampling is not None and self.sampling.failures
        if self.passed and (self.failures or self.threshold_error is not None or untrue):
            raise ValueError("passed is true next to failures")


class MetricsLine(msgspec.Struct, frozen=True):
    """One line of ``metrics.jsonl``, as far as the proof reads it."""

    step: Amount
    passed: bool | int | None = msgspec.field(name="r3/passed", default=None)


def _fingerprint(kind: type, value: Any) -> Any:
    if kind is not Fingerprint or not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"Expected 64 bits in hexadecimal (0x...), got {value!r:.60}")
    return Fingerprint(value, 16)


RECORDS = msgspec.json.Decoder(RecordLine, dec_hook=_fingerprint)
RESCORED = msgspec.json.Decoder(RecheckLine, dec_hook=_fingerprint)
STEPS = msgspec.json.Decoder(StepLine, dec_hook=_fingerprint)
METRICS = msgspec.json.Decoder(MetricsLine)


@dataclass(frozen=True, slots=True)
class FileLine(Generic[_LineT]):
    """A line of a file: its 1-based number, and the place after it.

    value: None where ``error`` says what is wrong with it.  torn: the file ends within it, as after
    a kill; a whole object that is refused is not torn, even without the end of its line, and nothing in a
    compressed part, which is whole or not there.
    """

    number: int
    end: int
    value: _LineT | None
    error: str = ""
    torn: bool = False


def read_lines(
    path: Path, decoder: msgspec.json.Decoder[_LineT], place: int = 0, number: int = 0
) -> Iterator[FileLine[_LineT]]:
    """The lines of a file or a compressed part from a place on, before which there are ``number``.

    Blank ones are left out.  Nothing is read after a line of more than 64 MiB, nor of a file that cannot
    be read: the error of the last line says so.
    """
    try:
        with PartLines(path, place, _MAX_LINE) as file:
            while raw := file.readline():
                number, place = number + 1, file.place()
                whole = raw.endswith(b"\n") or file.compressed
                if not whole and len(raw) == _MAX_LINE:
                    yield FileLine(number, place, None, f"longer than {_MAX_LINE} bytes")
                    return
                if raw.isspace():
                    continue
                try:
                    yield FileLine(number, place, decoder.decode(raw))
                except (ValueError, RecursionError) as error:
                    text = f"{error}{_got(raw, str(error))}"
                    torn = not whole and not _is_json(raw)
                    yield FileLine(number, place, None, text, torn=torn)
    except (OSError, PartError) as error:
        reason = getattr(error, "strerror", None) or error
        yield FileLine(number + 1, place, None, f"cannot be read: {reason}")


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def _got(raw: bytes, error: str) -> str:
    """The value of the key that an error names, where its text does not say it."""
    place = _PLACE.search(error)
    if place is None or ", got " in error:
        return ""
    try:
        return f", got {json.loads(raw)[place[1]]!r:.60}"
    except (ValueError, RecursionError):  # the line is damaged after that key as well
        return ""

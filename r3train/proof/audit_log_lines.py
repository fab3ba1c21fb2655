"""The R3 records in text logs, wherever in the text they stand, in bounded memory.

A log may have lost its line ends (newlines that became spaces, a bare carriage return): records are
told by how they begin, and one line may hold any number of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 20
# bytes that a record may take; a shape and its numbers take 150
_LONGEST = 4096
_SHOWN = 200
_MAX_RANKS = 1 << 17
_BEGIN = re.compile(
    rb"R3 (?:wrapper: replay_|check \(rank |check failed at step |evidence: a start of rank )"
    rb"|AssertionError: R3 mismatch tokens "
)
# a number of more digits is damage
_N = rb"(\d{1,15})"
_STAGE = rb"(replay_(?:forward|backward))"
_WRAPPER = re.compile(
    rb"R3 wrapper: " + _STAGE + rb" branch taken \(rank " + _N + rb", n_tokens=" + _N + rb", topk="
    rb"" + _N + rb", replay_idx_sum=(-?\d{1,18})\)"
)
_CHECK = re.compile(
    rb"R3 check \(rank " + _N + rb", stage " + _STAGE + rb"\): n_tokens=" + _N + rb" mismatch="
    rb"" + _N + rb" \("
)
_START = re.compile(rb"R3 evidence: a start of rank " + _N + rb"\b")
_STEP = re.compile(
    rb"(?:R3 check failed|AssertionError: R3 mismatch tokens \(\d+\) > threshold \([^)]*\))"
    rb" at step (\d{1,15})\b"
)
# A start goes on with the file of the one before, on the same line where that one was stopped within it.
# Its first words, behind this, are no record.
_STAMP = re.compile(rb"\d{4}(?:-\d\d){2} \d\d(?::\d\d){2},\d{3} rank \d+ [A-Z]+ \S+: ")


@dataclass(frozen=True)
class WrapperLine:
    """``R3 wrapper``: a router call took the replay branch."""

    rank: int
    stage: str
    num_rows: int
    topk: int
    replay_idx_sum: int


@dataclass(frozen=True)
class CheckLine:
    """``R3 check``: rows of a call, and those without a common expert."""

    rank: int
    stage: str
    num_rows: int
    mismatch: int


@dataclass(frozen=True)
class StartLine:
    """``R3 evidence``: what follows of the rank is of another start."""

    rank: int


@dataclass(frozen=True)
class ErrorLine:
    """What the run itself said of a check that failed."""

    text: str
    threshold: bool  # of the rows without a common expert
    step: int | None  # None: it does not say


@dataclass(frozen=True)
class DamagedLine:
    """What begins as a record and does not end as one.

    ``cut``: its writer was stopped within it, as the file ends there or the next start's text follows.
    """

    text: str
    cut: bool = False


LogLine = WrapperLine | CheckLine | StartLine | ErrorLine | DamagedLine


def log_lines(path: Path) -> Iterator[LogLine]:
    """The R3 records of a text file, in their order.  Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        text, more = b"", True
        while more:
            block = file.read(_BLOCK)
            more = bool(block)
            text += block
            # what begins near the end is left for the next round, when all of it is there
            end = len(text) - _LONGEST if more else len(text)
            for begin in _BEGIN.finditer(text):
                if begin.start() >= end:
                    break
                yield _record(text, begin.start(), last=not more)
            text = text[max(0, end) :]


def _record(text: bytes, at: int, *, last: bool) -> LogLine:
    if match := _WRAPPER.match(text, at):
        rank, rows, topk, idx_sum = (int(match[i]) for i in (2, 3, 4, 5))
        if rank < _MAX_RANKS:
            return WrapperLine(rank, match[1].decode(), rows, topk, idx_sum)
    elif match := _CHECK.match(text, at):
        rank, rows, mismatch = (int(match[i]) for i in (1, 3, 4))
        if rank < _MAX_RANKS:
            return CheckLine(rank, match[2].decode(), rows, mismatch)
    elif match := _START.match(text, at):
        return StartLine(int(match[1]))
    line = re.split(rb"[\r\n]", text[at : at + _LONGEST], maxsplit=1)[0]
    if text.startswith((b"R3 check failed", b"Assert"), at):
        step = _STEP.match(line)
        return ErrorLine(_shown(line), text.startswith(b"Assert", at), step and int(step[1]))
    stamp, record = _STAMP.search(line), _BEGIN.search(line, 1)
    if stamp and (record is None or stamp.end() < record.start()):
        return DamagedLine(_shown(line[: stamp.start()]), cut=True)
    ends = last and record is None and at + len(line) == len(text)
    return DamagedLine(_shown(line), cut=ends)


def _shown(line: bytes) -> str:
    return line[:_SHOWN].decode(errors="replace").strip()

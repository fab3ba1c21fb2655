"""Lines of JSON from files that may be damaged, in bounded memory whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

# a failed step of 4096 ranks with 100 layers takes some ten MB
_MAX_LINE = 64 << 20
TOO_LONG = f"longer than {_MAX_LINE} bytes"
_KEPT = 20


@dataclass(frozen=True)
class JsonLine:
    """One line: 1-based number, first byte, byte behind it; ``value`` is None where ``odd`` is set."""

    number: int
    begin: int
    end: int
    value: dict[str, Any] | None
    odd: str = ""
    cut: bool = False  # the file ends within it


def json_lines(path: Path, offset: int = 0, number: int = 0) -> Iterator[JsonLine]:
    """The lines from ``offset`` on, of which ``number`` were before; blank ones are left out.

    A line that is no JSON object, or is longer than 64 MiB, is told as odd and gone past.
    Raises OSError where the file cannot be read.
    """
    for number, begin, end, raw in raw_lines(path, offset, number):
        if raw is None:
            yield JsonLine(number, begin, end, None, TOO_LONG)
        elif raw.strip():
            try:
                value = orjson.loads(raw)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield JsonLine(number, begin, end, value)
            else:
                cut = not raw.endswith(b"\n")
                yield JsonLine(number, begin, end, None, "not a JSON object", cut)


def raw_lines(
    path: Path, offset: int = 0, number: int = 0
) -> Iterator[tuple[int, int, int, bytes | None]]:
    """Number, first byte, byte behind it, and bytes of each line; None for one beyond 64 MiB.

    Raises OSError where the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while raw := file.readline(_MAX_LINE):
            number, begin, offset = number + 1, offset, offset + len(raw)
            if len(raw) < _MAX_LINE or raw.endswith(b"\n"):
                yield number, begin, offset, raw
                continue
            while rest := file.readline(_MAX_LINE):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield number, begin, offset, None


class BrokenLines:
    """Lines that no crash explains: the first 20 of a file in words, and how many there are."""

    def __init__(self) -> None:
        self.first: dict[str, list[str]] = {}
        self.count: dict[str, int] = {}

    def add(self, file: str, number: int, what: object) -> None:
        kept = self.first.setdefault(file, [])
        if len(kept) < _KEPT:
            kept.append(f"{file} line {number}: {what}")
        self.count[file] = self.count.get(file, 0) + 1

    def more(self, file: str) -> int:
        """Broken lines of a file beyond those in words."""
        return self.count[file] - len(self.first[file])


def odd(name: str, got: Any, expected: str) -> ValueError:
    """An error that names a key, what was got and what was expected."""
    shown = repr(got)
    return ValueError(f"{name} is {shown[:60]}{'...' * (len(shown) > 60)}, expected {expected}")

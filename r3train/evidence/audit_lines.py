"""Lines of JSON from files that may be damaged, in bounded memory whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

# a failed step of 4096 ranks with 100 layers takes some ten MB
_MAX_LINE = 64 << 20
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
    with path.open("rb") as file:
        file.seek(offset)
        while raw := file.readline(_MAX_LINE):
            number, begin, offset = number + 1, offset, offset + len(raw)
            whole = raw.endswith(b"\n")
            if len(raw) == _MAX_LINE and not whole:
                while rest := file.readline(_MAX_LINE):
                    offset += len(rest)
                    if rest.endswith(b"\n"):
                        break
                yield JsonLine(number, begin, offset, None, f"longer than {_MAX_LINE} bytes")
                continue
            if not raw.strip():
                continue
            try:
                value = orjson.loads(raw)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield JsonLine(number, begin, offset, value)
            else:
                yield JsonLine(number, begin, offset, None, "not a JSON object", not whole)


class BrokenLines:
    """Lines that no crash explains: the first 20 of a file in words, and how many there are."""

    def __init__(self) -> None:
        self.first: dict[str, list[str]] = {}
        self.count: dict[str, int] = {}

    def add(self, file: str, number: int, what: str) -> None:
        kept = self.first.setdefault(file, [])
        if len(kept) < _KEPT:
            kept.append(f"{file} line {number}: {what}")
        self.count[file] = self.count.get(file, 0) + 1

    def more(self, file: str) -> int:
        """Broken lines of a file beyond those in words."""
        return self.count[file] - len(self.first[file])

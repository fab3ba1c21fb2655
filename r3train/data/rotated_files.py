"""Files of lines that grow for as long as a run goes on: what is full becomes a compressed part.

``NAME.jsonl`` is written and appended to.  Its parts are ``NAME.00001.jsonl.gz``, ``NAME.00002...`` and so on,
in the order in which they were written.  A part is compressed in members of whole lines, 64 KiB each: gzip
reads them as one file, and a reader goes on from any member.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from r3train.config.files import open_regular

logger = logging.getLogger(__name__)

# A file is rotated after the line that crosses this size.
PART_BYTES = 4 << 20
_MEMBER_BYTES = 1 << 16
_CHUNK = 1 << 16
_SCRATCH = ".tmp"


def parts_of(path: Path) -> list[Path]:
    """Return the parts of a file in their order, and the file itself last, where they exist.

    Of a part that a crash left both plain and compressed, the plain one.
    """
    found: dict[int, Path] = {}
    for other in sorted(path.parent.glob(f"{path.stem}.*"), key=lambda p: p.suffix == ".gz"):
        if (number := _number(path, other)) is not None:
            found.setdefault(number, other)
    return [found[n] for n in sorted(found)] + ([path] if path.exists() else [])


def close_part(path: Path, label: str = "", begin_anew: Callable[[], None] = lambda: None) -> None:
    """Make a part of a file; afterwards there is no such file, or the one that ``begin_anew`` made.

    label: follows the part's number in its name.  begin_anew: called before the part is compressed;
    after it nobody may write to the old file.
    """
    numbers = [_number(path, part) or 0 for part in parts_of(path)]
    part = path.with_name(f"{path.stem}.{max(numbers) + 1:05d}{label}{path.suffix}")
    path.rename(part)
    begin_anew()
    _compress(part)


def finish_parts(path: Path) -> None:
    """Compress the parts that a crash left plain."""
    for part in path.parent.glob(f"{path.stem}.*{_SCRATCH}"):
        part.unlink()
    for part in parts_of(path):
        if part != path and part.suffix != ".gz":
            _compress(part)


def _number(path: Path, part: Path) -> int | None:
    """The place of a part of ``path`` among its parts; None where it is none."""
    pattern = (
        rf"{re.escape(path.stem)}\.(\d{{5,9}})(?:\.\w[\w-]*)?{re.escape(path.suffix)}(?:\.gz)?"
    )
    match = re.fullmatch(pattern, part.name, re.ASCII)
    return int(match[1]) if match else None


def _compress(part: Path) -> None:
    """Put a compressed part in the place of a plain one; where that fails the plain one stays."""
    scratch = part.with_name(f"{part.name}.gz{_SCRATCH}")
    try:
        with part.open("rb") as lines, scratch.open("wb") as out:
            while member := b"".join(lines.readlines(_MEMBER_BYTES)):
                out.write(gzip.compress(member, mtime=0))
            out.flush()
            os.fsync(out.fileno())
        scratch.rename(part.with_name(f"{part.name}.gz"))
        _sync_directory(part.parent)
        part.unlink()
    except OSError as error:
        logger.warning("%s stays as it is: it cannot be compressed: %s", part, error.strerror)
        scratch.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PartError(ValueError):
    """A compressed part that is damaged."""


class PartLines:
    """The lines of a plain or a compressed file, from a place on; a context manager.

    A place is a byte of a plain file; of a compressed one it has a member's first byte in its high bits
    and a byte of that member's content in its low ones.  Raises OSError and PartError for what cannot be
    read; of a member at most ``limit`` bytes are.
    """

    _SHIFT = 40

    def __init__(self, path: Path, place: int, limit: int):
        self._file = open_regular(path)
        self._limit = limit
        self.compressed = path.suffix == ".gz"
        if self.compressed:
            self._member, self._within = place >> self._SHIFT, place & ((1 << self._SHIFT) - 1)
            self._next, self._content = self._member, b""
            self._inflate()
        else:
            self._file.seek(place)
            self._at = place

    def __enter__(self) -> PartLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def readline(self) -> bytes:
        """The next line with its end, or its first ``limit`` bytes; empty at the end of the file."""
        if not self.compressed:
            line = self._file.readline(self._limit)
            self._at += len(line)
            return line
        while self._within >= len(self._content):
            self._member, self._within = self._next, 0
            if not self._inflate():
                return b""
        end = self._content.find(b"\n", self._within) + 1 or len(self._content)
        line, self._within = self._content[self._within : end], end
        return line

    def place(self) -> int:
        """The place after the last line."""
        if not self.compressed:
            return self._at
        return self._member << self._SHIFT | self._within

    def _inflate(self) -> bool:
        """Read the member at ``_next``; False at the end of the file."""
        self._file.seek(self._next)
        inflate, self._content = zlib.decompressobj(wbits=31), b""
        while not inflate.eof and (chunk := self._file.read(_CHUNK)):
            try:
                self._content += inflate.decompress(chunk, self._limit - len(self._content))
            except zlib.error as error:
                raise PartError(f"not gzip: {error}") from None
            if len(self._content) >= self._limit:
                raise PartError(f"a part of more than {self._limit} bytes in one piece")
        if self._file.tell() == self._next:
            return False
        if not inflate.eof:
            raise PartError("gzip data ends within a member")
        self._next = self._file.tell() - len(inflate.unused_data)
        return True

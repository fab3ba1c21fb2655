"""Files of lines that grow for as long as a run goes on: what is full becomes a compressed part.

``NAME.jsonl`` is written and appended to.  Its parts are ``NAME.00001.jsonl.gz``, ``NAME.00002...`` and so on,
in the order in which they were written.  A part is compressed in members of whole lines, 64 KiB each, which
gzip reads as one file.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# A file is rotated after the line that crosses this size.
PART_BYTES = 4 << 20
MEMBER_BYTES = 1 << 16
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
            while member := b"".join(lines.readlines(MEMBER_BYTES)):
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

"""Files with one JSON object per line, which a later run can append to after a crash."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from r3train.config.files import bounded_lines, naming, open_regular, require_regular

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON-able records in one write; the file is made where it is missing.

    A truncated line that a crash left at the end is cut off first.  Raises OSError (a full disk), which
    names the file, with none of the records in it, and for a path that is no regular file.
    """
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    cut_truncated_line(path)
    # unbuffered: one write call, all or a short count
    with naming(path), path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            written = file.write(content)
            if written < len(content):
                file.write(content[written:])  # raises the error that cut the first write short
        except OSError:
            os.truncate(path, before)
            raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file; a last line without a newline, left by a crash, is left out.

    Raises ValueError, with file and line, for any other line that is no JSON object, and OSError for a
    path that is no regular file.
    """
    records = []
    with open_regular(path) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(record, dict):
                got = type(record).__name__
                raise ValueError(f"{path}:{number}: got {got}, expected an object")
            records.append(record)
    return records


def cut_truncated_line(path: Path) -> None:
    """Cut off a truncated last line, which a crash left, so that appending starts a line.

    Reads the file from its end to the last newline only.
    """
    require_regular(path)
    if not path.exists():
        return
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        num_bytes = _end_of_last_line(file, size)
    if num_bytes < size:
        logger.warning("%s ended in a truncated line; it was cut off", path)
        os.truncate(path, num_bytes)


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    """The offset after the last newline, 0 without one."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

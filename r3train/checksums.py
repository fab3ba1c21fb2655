"""Checksums of a directory's files: of a checkpoint, or of an export.

They find accidents of disks, memory and copies, and are no defence against somebody who changes both.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from r3train.config.files import open_regular

Sums = Mapping[str, Mapping[str, int]]  # by file name: bytes, crc32

_CHUNK = 1 << 22
_MOST_THREADS = 8


def checksum(path: Path) -> dict[str, int]:
    """Return a file's bytes and their crc32; raises OSError naming it if it is no regular file."""
    size = crc = 0
    with open_regular(path, follow=True) as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"bytes": size, "crc32": crc}


def checksums(directory: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the checksums of files by name; several threads read them."""
    names = sorted(names)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: checksum(directory / name), names)))


def parsed(found: Any, source: Path) -> Sums:
    """Return checksums as they were read from a file; raises ValueError naming it if they are none."""
    right = isinstance(found, dict) and all(
        # a name only: nothing outside of the directory is read
        name == os.path.basename(name)
        and isinstance(sums, dict)
        and all(type(sums.get(key)) is int for key in ("bytes", "crc32"))
        for name, sums in found.items()
    )
    if not right:
        raise ValueError(f"{source}: files is no table of bytes and crc32 by file name")
    return found


def part_of(sums: Sums, part: int, parts: int) -> list[str]:
    """Return the names that one of several readers checks: each file has one, and all read about as much."""
    loads, names = [0] * parts, []
    for name in sorted(sums, key=lambda name: (-sums[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += sums[name]["bytes"]
        if least == part:
            names.append(name)
    return names


def first_fault(directory: Path, sums: Sums, names: Iterable[str], source: Path) -> str | None:
    """Return the first file, in words, that is not what its checksum was made of; or None."""

    def fault(name: str) -> str | None:
        path, expected = directory / name, sums[name]
        try:
            got = checksum(path)
        except FileNotFoundError:
            return f"{path}: missing, and {source.name} names it"
        except OSError as error:
            return f"{path}: {error.strerror}"
        if got == expected:
            return None
        return (
            f"{path}: damaged: {got['bytes']} bytes with crc32 {got['crc32']:#010x}, expected"
            f" {expected['bytes']} with {expected['crc32']:#010x}; if it was changed on purpose, remove"
            f" its entry from {source.name}"
        )

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return next(filter(None, pool.map(fault, sorted(names))), None)


def check(directory: Path, sums: Sums, names: Iterable[str], source: Path) -> None:
    """Raise ValueError naming the first of the files that is not what its checksum was made of."""
    if (fault := first_fault(directory, sums, names, source)) is not None:
        raise ValueError(fault)

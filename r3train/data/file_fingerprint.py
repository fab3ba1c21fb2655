"""Fingerprints of files and settings, which show if they changed since they were used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """The content of files and the marks by which a change is noticed without reading them."""

    paths: tuple[Path, ...]
    sha256: str  # one file: its hash; several files: the hash of their hashes
    marks: tuple[tuple[int, int, int], ...]  # size in bytes, mtime in ns, inode

    @classmethod
    def of(cls, *paths: Path) -> FileFingerprint:
        """Fingerprint files; raises OSError if one cannot be read."""
        marks = tuple(map(_marks, paths))
        digests = []
        for path in paths:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        several = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        return cls(paths, digests[0] if len(digests) == 1 else several, marks)

    def changed(self) -> bool:
        """True if the content has changed or the file is gone; read only if its marks changed."""
        try:
            if tuple(map(_marks, self.paths)) == self.marks:
                return False
            return FileFingerprint.of(*self.paths).sha256 != self.sha256
        except OSError:
            return True


def _marks(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def facts_fingerprint(facts: Mapping[str, Any]) -> str:
    """A short fingerprint of JSON-able facts, in any order."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

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
    """A file's content and the marks by which a change is noticed without reading it."""

    path: Path
    sha256: str
    marks: tuple[int, int, int]  # size in bytes, mtime in ns, inode

    @classmethod
    def of(cls, path: Path) -> FileFingerprint:
        """Fingerprint a file; raises OSError if it cannot be read."""
        marks = _marks(path)
        with path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, "sha256").hexdigest(), marks)

    def changed(self) -> bool:
        """True if the content has changed or the file is gone; read only if its marks changed."""
        try:
            if _marks(self.path) == self.marks:
                return False
            return FileFingerprint.of(self.path).sha256 != self.sha256
        except OSError:
            return True


def _marks(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def facts_fingerprint(facts: Mapping[str, Any]) -> str:
    """A short fingerprint of JSON-able facts, in any order."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

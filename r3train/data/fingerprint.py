"""A fingerprint of the prompt file, which shows if the file changed since the run began."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


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

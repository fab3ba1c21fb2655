"""Files that name servers: a host:port in each line, or a directory of such files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from r3train.config.files import open_regular
from r3train.engine.addresses import base_url

_MOST_BYTES = 1 << 20


def read_addresses(path: Path) -> set[str]:
    """Return the URLs that a file names, or the files of a directory; hidden ones and ``*.tmp`` are not read.

    Raises OSError where one cannot be read, ValueError for an address without a port, and PermissionError for what another
    user owns or may write: every server that is named gets the run's key.
    """
    files = [path]
    if path.is_dir():
        _require_own(path, path.stat())
        names = (file for file in path.iterdir() if not file.name.startswith("."))
        files = [file for file in names if file.suffix != ".tmp"]
    return {base_url(address) for file in files for address in _words(file)}


def _words(path: Path) -> list[str]:
    with open_regular(path, follow=True) as file:  # a volume of Kubernetes holds links
        _require_own(path, os.fstat(file.fileno()))
        return file.read(_MOST_BYTES).decode(errors="replace").split()


def _require_own(path: Path, found: os.stat_result) -> None:
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    if found.st_uid not in (0, os.getuid()) or found.st_mode & writable_by_others:
        raise PermissionError(
            f"{path}: owned by user {found.st_uid} with mode {found.st_mode & 0o777:o}, expected this user and nobody else"
            " who may write it (chmod go-w): every server that it names gets the run's key"
        )

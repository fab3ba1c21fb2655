"""Files that somebody else may have put in place, opened so that none of them can hang or harm the reader.

A directory of a run comes from an archive or from another user: a name in it may be a link to a file of
one's own, a FIFO that nobody writes to, or a link to /dev/zero.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# far above any configuration; tomllib takes seconds for more
MAX_TOML_BYTES = 1 << 20
_MAX_JSON_BYTES = 64 << 20  # a config.json has a few kilobytes
_MAX_KEY_PARTS = 16
_FULL_BYTES = 1 << 20  # a disk with less is full
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_OUR_DIRECTORIES = ("models", "data", "runs", "checkpoints")
_PROMPT_SUFFIXES = (".jsonl", ".json", ".parquet")
# the parts of TOML that may hold a dot without being a key, and those of keys
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|("(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|[A-Za-z0-9_-]+)|#[^\n]*|[ \t]+|.',
    re.DOTALL,
)
# a line of ours with a whole answer and its prompt is below 1 MiB
MAX_LINE_BYTES = 64 << 20
# in tomllib's words -> a remedy
_TOML_HINTS = {
    "Invalid value": " (texts and paths stand in quotes; switches are true and false)",
    "Cannot overwrite": " (the key is given twice)",
}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}


def path_hint(path: Path, *, dataset: bool = False) -> str:
    """Return what to add to "no such file": of a near name, of a name of the Hugging Face hub, else "".

    The pages' own directories and a directory that is here begin no such name.
    """
    if path.parent.is_dir():
        names = [file.name for file in path.parent.glob("*")]
        if near := difflib.get_close_matches(path.name, names, 1, 0.8):
            return f"; did you mean {path.with_name(near[0])}?"
    owner, _, name = str(path).partition("/")
    local = owner in _OUR_DIRECTORIES or Path(owner).is_dir() or path.suffix in _PROMPT_SUFFIXES
    if local or not _HUB_NAME.fullmatch(str(path)):
        return ""
    place = (
        f"--repo-type dataset --local-dir data/{name}" if dataset else f"--local-dir models/{name}"
    )
    return f"; r3train downloads nothing: hf download {path} {place}"


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading; never waits for a writer.

    follow: also where ``path`` is a link to one.  Raises OSError naming the file for anything else.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            require_regular(path, follow=follow)
        raise
    try:
        _require(path, os.fstat(file))
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; raises OSError naming it."""
    with open_regular(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"holds more than {most} bytes", str(path))
    return content


def read_toml(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a regular file of TOML; raises OSError naming the file, and ValueError that says what is wrong with it.

    A file of more than 1 MiB, deep nesting and a key of thousands of parts, for which tomllib takes minutes,
    are refused.
    """
    return parse_toml(read_regular(path, MAX_TOML_BYTES, follow=follow))


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse TOML; raises ValueError as ``read_toml`` does."""
    try:
        text = content.decode("utf-8-sig")  # editors of Windows put a mark at the start
        _check_keys(text)
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("not valid TOML: nested too deeply for a configuration") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid TOML: {error}: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        hint = next((hint for said, hint in _TOML_HINTS.items() if said in str(error)), "")
        if place := re.search(r"at line (\d+)", str(error)):
            hint = f": {text.split(chr(10))[int(place[1]) - 1].strip()[:80]}{hint}"
        raise ValueError(f"not valid TOML: {error}{hint}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"not valid TOML: {str(error).removeprefix('not valid TOML: ')}") from None


def _check_keys(text: str) -> None:
    """Raise ValueError for a key of many parts: the time for one grows with their square."""
    parts, after_dot = 0, False
    for token in _TOKEN.finditer(text):
        if token[1]:
            parts = parts + 1 if after_dot else 1
            if parts > _MAX_KEY_PARTS:
                line = text.count("\n", 0, token.start()) + 1
                raise ValueError(f"line {line} has a key of more than {_MAX_KEY_PARTS} parts")
        if token[0].strip(" \t"):  # space may stand around a dot
            after_dot = token[0] == "."


def require_regular(path: Path, *, follow: bool = False) -> None:
    """Raise OSError naming ``path`` unless it is a regular file; one that is missing passes."""
    try:
        _require(path, os.stat(path, follow_symlinks=follow))
    except FileNotFoundError:
        pass


def _require(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise OSError(errno.EINVAL, f"is {kind}, expected a regular file", str(path))


def bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; raises OSError naming one above MAX_LINE_BYTES."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            text = f"line {number} has more than {MAX_LINE_BYTES} bytes"
            raise OSError(errno.EFBIG, text, str(path))
        yield line


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of the block the name of the file that was written (a full disk)."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def require_own_files(directory: Path) -> None:
    """Raise OSError naming the first entry of a directory that a writer must not open: a link to a file, a FIFO.

    Directories and links to them pass, and so does a directory that is missing.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if not entry.is_dir():
            require_regular(Path(entry.path))


def write_atomically(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old content or the new.  A link is replaced, not followed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with naming(path), temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def free_bytes_if_full(directory: Path) -> int | None:
    """Return the free bytes of a directory's disk where they are under 1 MiB; None where there are more."""
    try:
        found = os.statvfs(directory)
    except OSError:  # not made yet
        return None
    free = found.f_bavail * found.f_frsize
    return free if free < _FULL_BYTES else None


def load_json_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; raises ValueError naming it."""
    try:
        content = json.loads(read_regular(file, _MAX_JSON_BYTES, follow=True).decode())
    except OSError as error:
        raise ValueError(f"{file}: cannot read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply for a configuration") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{file}: not JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, got {type(content).__name__}")
    return content

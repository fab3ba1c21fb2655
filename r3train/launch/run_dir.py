"""The directories of a run: each belongs to one job."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.config.checkpoint_settings import ROLLOUT_ID
from r3train.config.files import require_own_files, require_regular, write_atomically
from r3train.config.sources import ConfigError

CONFIG_FILE, METRICS_FILE = "config.toml", "metrics.jsonl"
# says who writes here; a lock on it is held while a job does
OWNER_FILE = ".owner"
# open files that a process may have at least, where its hard limit allows that
_FILES = 65536
# directories of a run in which it opens files by name
_WRITTEN_IN = ("logs", "evidence", "eval", "rollouts", "bad_steps")
# prompts, answers, labels, logs and weights are nobody else's: give a directory of another mode to share
_PRIVATE = 0o700


def claim_directories(config: RunConfig, claims: ExitStack) -> Path:
    """Make the run's directory; lock it and those of checkpoints and exports, for rank 0; returns the first.

    claims: holds the locks; they end with the process too, however it ends.
    Raises ConfigError if another job holds one.
    """
    run_dir = config.run.run_dir
    if run_dir is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        run_dir = _new_directory(Path("runs") / f"{stamp}-{config.run.run_name}")
    for name in ("", *_WRITTEN_IN):
        _refuse_links(run_dir / name, "run_dir")
    _claim(run_dir, "run_dir", claims)
    _keep_earlier(run_dir / CONFIG_FILE, config.to_toml())
    save = config.checkpoint.save
    if save is not None and save.resolve() != run_dir.resolve():
        _refuse_links(save, "save")
        _claim(save, "save", claims)
    if (save_hf := config.checkpoint.save_hf) is not None:
        # an export replaces its directory: the lock is next to the first part that exports name anew
        parts = (*reversed(save_hf.parents), save_hf)
        place = next((part for part in parts if ROLLOUT_ID in part.name), save_hf)
        _claim(place, "save_hf", claims, place.with_name(f".{place.name}{OWNER_FILE}"))
    return run_dir


def _new_directory(path: Path) -> Path:
    """Make a directory that nobody has, with a number after its name where it is taken."""
    for number in itertools.count(1):
        new = path.with_name(path.name + (f"-{number}" if number > 1 else ""))
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.mkdir(mode=_PRIVATE)
            return new
        except FileExistsError:
            continue
    raise AssertionError


def _make(directory: Path) -> None:
    """Make a directory that its owner alone enters; one that is there keeps its mode."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=_PRIVATE, exist_ok=True)


def _refuse_links(directory: Path, setting: str) -> None:
    """Raise ConfigError for a file of a directory through which a run would write somewhere else, or wait."""
    try:
        require_own_files(directory)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror} ({setting}): a run writes the files of its directory"
        ) from None


def _claim(directory: Path, setting: str, claims: ExitStack, path: Path | None = None) -> None:
    """Lock a directory until ``claims`` closes; on a file system without locks nothing is locked.

    path: the file that is locked, else one in the directory.
    """
    if path is None:
        path = directory / OWNER_FILE
        _make(directory)
    path.parent.mkdir(parents=True, exist_ok=True)  # of exports, which have the umask's mode
    try:
        require_regular(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # never through a link
        file = claims.enter_context(os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened ({setting}): {error.strerror}") from None
    try:
        # not flock: a forked writer of checkpoints would hold it after its rank was killed
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "another job"
        raise ConfigError(
            f"{directory}: in use ({setting}) by {holder}: one job a directory"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {start_stamp()}\n")
    file.flush()


def raise_file_limit() -> None:
    """Raise the soft limit of open files: every request in flight is one, and servers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_run_dir(config: RunConfig, run_dir: Path | None, broadcast: Callable[[Any], Any]) -> Path:
    """Save the configuration in the run's directory; returns the directory on every rank.

    run_dir: rank 0's, of ``claim_directories``.  broadcast: returns rank 0's value on all ranks.
    """
    run_dir = Path(broadcast(str(run_dir)))
    _make(run_dir)  # a node's own disk
    write_atomically(run_dir / CONFIG_FILE, config.to_toml())
    return run_dir


def _keep_earlier(path: Path, text: str) -> None:
    """Keep the file of an earlier start as config.1.toml and so on, if ``text`` differs from it."""
    if not path.is_file() or path.read_text(encoding="utf-8") == text:
        return
    copies = (path.with_name(f"config.{number}.toml") for number in itertools.count(1))
    for copy in copies:
        if not copy.exists():
            shutil.copyfile(path, copy)
        if copy.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"):
            return  # a start that failed before it wrote its own may have kept it


def check_fresh(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ValueError where a run that resumes nothing would append to the files of another one.

    A start of torchrun's --max-restarts goes on with the files of the start before.  Over several nodes
    torchrun counts a restart only on the node whose ranks failed: --auto-resume serves there.
    """
    checkpoint, run_dir = config.checkpoint, config.run.run_dir
    resumes = checkpoint.auto_resume or (checkpoint.load and not checkpoint.load_model_only)
    if run_dir is None or resumes or environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    metrics = run_dir / METRICS_FILE
    if metrics.is_file() and metrics.stat().st_size:
        raise ValueError(
            f"{run_dir}: holds a run already ({METRICS_FILE}): resume it (--auto-resume, --load), or"
            " give this one another --run-dir"
        )


def start_stamp() -> str:
    """Return a name for this start of the job; it sorts after every earlier one."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def check_can_be_made(directory: Path, setting: str, *, beside: bool = False) -> None:
    """Raise ValueError unless ``directory`` or its nearest parent that exists can be written to.

    next to: a parent must be, for the directory is put in its place by its name.
    """
    places, there = (directory.absolute(), *directory.absolute().parents)[beside:], directory
    try:
        there = next(p for p in places if p.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"{directory}: cannot be made ({setting}): {there}: cannot be written: {error.strerror}"
        ) from None

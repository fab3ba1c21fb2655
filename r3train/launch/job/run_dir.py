"""The directories of a run: each belongs to one job."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.config.checkpoint_settings import ROLLOUT_ID
from r3train.config.files import require_own_files, require_regular, write_atomically
from r3train.config.sources import ConfigError
from r3train.data.json_lines import append_lines, read_lines
from r3train.generation.buffer import OUTCOMES_FILE
from r3train.hf_checkpoint import MARKER
from r3train.loop import prompt_log
from r3train.loop.rollout_file import BUFFER_FILE, read_facts
from r3train.observe.metrics import EVAL_METRICS_FILE, METRICS_FILE, SAMPLES_FILE
from r3train.trainer.megatron.saved_state import (
    LATEST,
    RUN_DIR,
    SAVE_DIR,
    checkpoints,
    latest_checkpoint,
    read_state,
)

CONFIG_FILE = "config.toml"
# says who writes here; a lock on it is held while a job does
OWNER_FILE = ".owner"
# open files that a process may have at least, where its hard limit allows that
_FILES = 65536
# directories of a run in which it opens files by name
_WRITTEN_IN = ("logs", "evidence", "eval", "rollouts", "bad_steps", "superseded", "superseded/eval")
# its lines of steps that a resumed run trains again go there; evidence has a start's name in each line
_SUPERSEDED = "superseded"
# prompts, answers, labels, logs and weights are nobody else's: give a directory of another mode to share
_PRIVATE = 0o700


def claim_directories(config: RunConfig, claims: ExitStack) -> Path:
    """Make the run's directory; lock it and those of checkpoints and exports, for rank 0; returns the first.

    A start that goes on from a checkpoint of --save goes on in the run directory of it, unless --run-dir names
    another one; lines of steps that come again are moved away there.
    claims: holds the locks; they end with the process too, however it ends.
    Raises ConfigError if another job holds one.
    """
    checkpoint = checkpoint_to_resume(config)
    state = {} if checkpoint is None else read_state(checkpoint)
    run_dir = config.run.run_dir or _run_dir_of(state, config)
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
    if checkpoint is not None or config.checkpoint.auto_resume:
        first = state.get("num_rollouts", 0)
        for name in (METRICS_FILE, SAMPLES_FILE, prompt_log.FILE):
            _set_aside(run_dir, name, first)
        _set_aside(run_dir, OUTCOMES_FILE, first, _comes_again(checkpoint))
        # the step of an evaluation is a weight version, and that of the checkpoint stays
        _set_aside(run_dir, EVAL_METRICS_FILE, first + 1)
    return run_dir


def _comes_again(checkpoint: Path | None) -> Callable[[Mapping[str, Any]], bool]:
    """Tell for an outcome whether its group waits in the checkpoint, or was sampled after it."""
    if checkpoint is None or not (checkpoint / BUFFER_FILE).is_file():
        return lambda outcome: True
    facts = read_facts(checkpoint / BUFFER_FILE)
    waiting = {group["group_id"] for group in facts["groups"]}
    return lambda outcome: outcome["group_id"] in waiting or (
        outcome["group_id"] >= facts["next_group"]
    )


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """Return the checkpoint of --save that a start goes on from; None for any other start."""
    settings = config.checkpoint
    if settings.save is None or not (settings.save / LATEST).is_file():
        return None
    loads = settings.load is not None and not settings.load_model_only
    goes_on = loads and settings.load.resolve() == settings.save.resolve()
    return latest_checkpoint(settings.save) if settings.auto_resume or goes_on else None


def _run_dir_of(state: Mapping[str, Any], config: RunConfig) -> Path | None:
    """The run directory of the run that saved a checkpoint in --save; None where it is unknown, or gone.

    Copied checkpoints are of another run than theirs.
    """
    run_dir, save = state.get(RUN_DIR), state.get(SAVE_DIR)
    if run_dir is None or save != str(config.checkpoint.save.resolve()):
        return None
    path, here = Path(run_dir), Path.cwd()
    if not all((path / name).is_file() for name in (OWNER_FILE, CONFIG_FILE, METRICS_FILE)):
        return None
    return path.relative_to(here) if path.is_relative_to(here) else path


def _set_aside(
    run_dir: Path,
    name: str,
    first_step: int,
    comes_again: Callable[[Mapping[str, Any]], bool] = lambda record: True,
) -> None:
    """Move a file's lines of steps from ``first_step`` on to ``superseded/``, if they come again."""
    path = run_dir / name
    if not path.is_file():
        return
    kept, again = [], []
    for record in read_lines(path):
        is_again = record.get("step", -1) >= first_step and comes_again(record)
        (again if is_again else kept).append(record)
    if again:  # a kill between the two writes leaves lines in both files, and loses none
        _make((run_dir / _SUPERSEDED / name).parent)
        append_lines(run_dir / _SUPERSEDED / name, again)
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


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


def taken_directories(config: RunConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (subject, complaint) for each directory of another run that this one would write to.

    A start of torchrun's --max-restarts goes on with the files of the start before.  Over several nodes
    torchrun counts a restart only on the node whose ranks failed: --auto-resume serves there.
    """
    checkpoint, run_dir, save = config.checkpoint, config.run.run_dir, config.checkpoint.save
    if environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    resumes = checkpoint.auto_resume or (checkpoint.load and not checkpoint.load_model_only)
    metrics = None if run_dir is None else run_dir / METRICS_FILE
    if metrics and not resumes and metrics.is_file() and metrics.stat().st_size:
        yield "run directory", (
            f"{run_dir}: holds a run already ({METRICS_FILE}): resume it (--auto-resume, --load), or"
            " give this one another --run-dir"
        )
    saved = [] if save is None or checkpoint.auto_resume else checkpoints(save)
    if saved and checkpoint_to_resume(config) is None:
        yield "checkpoints", (
            f"{save}: holds checkpoints of another run ({saved[0].name} to {saved[-1].name}): go on from"
            " them (--auto-resume), or give this run another --save"
        )
    exports = (
        []
        if checkpoint.save_hf is None or resumes
        else checkpoint.hf_directories(config.rollout.num_rollout)
    )
    for directory in exports:
        if (directory / MARKER).is_file():
            yield "checkpoints", (
                f"{directory}: holds the export of another run: give this one another --save-hf, or remove"
                " that"
            )
            return


def start_stamp() -> str:
    """Return a name for this start of the job; it sorts after every earlier one."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def check_can_be_made(directory: Path, setting: str, *, parents_only: bool = False) -> None:
    """Raise ValueError unless ``directory`` or its nearest parent that exists can be written to.

    parents_only: check a parent, because the directory itself is made elsewhere and renamed into its place.
    """
    places, there = (directory.absolute(), *directory.absolute().parents)[parents_only:], directory
    try:
        there = next(p for p in places if p.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"{directory}: cannot be made ({setting}): {there}: cannot be written: {error.strerror}"
        ) from None

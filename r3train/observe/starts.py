"""The starts of a run: a line of ``starts.jsonl`` each, as a resumed run has several."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from r3train.config.files import write_atomically
from r3train.data.json_lines import append_lines, read_lines

if TYPE_CHECKING:
    import torch

STARTS_FILE = "starts.jsonl"
_PACKAGES = ("r3train", "torch", "megatron-core", "sglang", "transformers", "transformer-engine")
_GIT_S = 10.0


class Start(msgspec.Struct, frozen=True):
    """One start of a run; "" and {} stand for what is not known."""

    time: str  # of the start, in UTC
    command: str  # that started the ranks, as a shell takes it
    directory: str  # in which it was given
    first_step: int  # 0, or that after the checkpoint of a resume
    host: str  # of rank 0
    ranks: int
    gpu: str  # model of rank 0's
    versions: dict[str, str]  # by package, and python's
    commits: dict[str, str]  # of git checkouts: that of r3train and the working directory's
    parts: dict[str, float] = {}  # seconds of each until the first step had ended, in order


class StartParts:
    """Seconds of each part of a start, from its command to the end of its first step; rank 0 has one.

    launcher: the process that started the ranks.
    """

    def __init__(self, run_dir: Path, launcher: int) -> None:
        self._run_dir, self.seconds, self._last = run_dir, {}, psutil.Process().create_time()
        with suppress(psutil.Error):
            began, self._last = self._last, psutil.Process(launcher).create_time()
            self.end("launcher", began)
        self.end("imports and checks", time.time())

    def end(self, part: str, now: float) -> None:
        """End a part, which began where the one before ended."""
        self.seconds[part] = round(self.seconds.get(part, 0.0) + now - self._last, 3)
        self._last = now

    def end_first_step(self, metrics: Mapping[str, Any]) -> str:
        """Write the parts into the last line of ``starts.jsonl``; returns them in words."""
        now = time.time()
        began, waited = now - metrics["perf/step_s"], metrics["perf/rollout_wait_s"]
        self.end("before the first rollout", began)
        self.end("waiting for the first rollout", began + waited)
        self.end("first step", now)
        path = self._run_dir / STARTS_FILE
        if path.exists():  # or nothing is trained
            *before, start = read_lines(path)
            lines = [*before, {**start, "parts": self.seconds}]
            write_atomically(path, "".join(f"{json.dumps(line)}\n" for line in lines))
        words = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"the first step has ended after {sum(self.seconds.values()):.1f} s: {words}"


def record_start(
    run_dir: Path, time: str, first_step: int, launcher: int, ranks: int, device: torch.device
) -> None:
    """Append this start to ``run_dir/starts.jsonl``.

    launcher: the process that started the ranks, whose command is recorded.  device: rank 0's.
    """
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    import torch  # late: who only reads this needs none

    package, cwd = Path(__file__).parents[2], Path.cwd()
    # site-packages may lie within a checkout of something else
    commits = {"r3train": _commit(package) if (package / ".git").exists() else ""}
    commits["working directory"] = _commit(cwd) if cwd != package else ""
    start = Start(
        time=time,
        command=_command(launcher),
        directory=str(cwd),
        first_step=first_step,
        host=socket.gethostname(),
        ranks=ranks,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        versions=versions,
        commits={name: commit for name, commit in commits.items() if commit},
    )
    append_lines(run_dir / STARTS_FILE, [msgspec.to_builtins(start)])


def read_starts(run_dir: Path) -> list[Start]:
    """Read the starts of a run in order; [] for a run without the file.

    Raises ValueError, with file and line, for a line that is none.
    """
    path = run_dir / STARTS_FILE
    starts = []
    for number, record in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            starts.append(msgspec.convert(record, Start))
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return starts


def _command(process: int) -> str:
    """The command of a process, or of this one if that has ended, without Python and the folder of a script."""
    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        words = sys.orig_argv
    if words and Path(words[0]).name.startswith("python") and len(words) > 1:
        if (
            Path(words[1]).absolute().parent == Path(sys.executable).parent
        ):  # a program of the environment
            words = [Path(words[1]).name, *words[2:]]
    return shlex.join(words)


def _commit(directory: Path) -> str:
    """The commit of a checkout, with "-dirty" where tracked files were changed; "" without git."""
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *describe],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            encoding="utf-8",
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()

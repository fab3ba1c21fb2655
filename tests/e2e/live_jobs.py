"""Jobs that a test watches, disturbs and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.e2e import jobs


@contextmanager
def running(
    run_dir: Path, *flags: str, torchrun: tuple[str, ...] = (), **how: Any
) -> Iterator[psutil.Popen]:
    """A job that goes on; whatever is left of it is ended.  how: as for ``jobs.command``."""
    command = jobs.command(run_dir, *flags, **how)
    at = command.index("--nproc-per-node")
    command[at:at] = torchrun
    job = jobs.start(command, run_dir.parent / f"{run_dir.name}.txt")
    tree: list[psutil.Process] = []
    try:
        yield job
        tree = job.children(recursive=True) if job.is_running() else []
    finally:
        with_children = [*tree, job]
        if job.poll() is None:
            with_children += job.children(recursive=True)
        end(with_children)
        job.wait()


def end(processes: list[psutil.Process]) -> None:
    """Kill those of them that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def output(run_dir: Path) -> str:
    return (run_dir.parent / f"{run_dir.name}.txt").read_text()


def wait_for(
    condition: Callable[[], bool], job: psutil.Popen, run_dir: Path, timeout: float = 400
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert job.poll() is None, output(run_dir)
        assert time.monotonic() < deadline, output(run_dir)
        time.sleep(0.05)


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def pointer(directory: Path) -> int:
    path = directory / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def rank_processes(job: psutil.Popen) -> dict[int, psutil.Process]:
    found = {}
    for process in job.children():
        if "train_async.py" in " ".join(process.cmdline()):
            found[int(process.environ()["RANK"])] = process
    return found


def scheduler(job: psutil.Popen) -> psutil.Process:
    """The server's process that computes."""
    for process in job.children(recursive=True):
        try:
            words = " ".join([process.name(), *process.cmdline()])
        except psutil.NoSuchProcess:
            continue
        if "sglang" in words and "scheduler" in words:
            return process
    raise AssertionError("no scheduler")


def server(job: psutil.Popen) -> psutil.Process:
    """The program that listens for requests."""
    for process in job.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "r3train.engine.launch_server" in process.cmdline()[:3]:
                return process
    raise AssertionError("no server with a key")

"""The processes of a job in a soak: what each does, what memory it holds, what it shares."""

from __future__ import annotations

from pathlib import Path

import psutil


def role(process: psutil.Process, job: psutil.Process) -> str:
    """A name for what a process does; a short-lived helper (a forked writer) has none: ""."""
    try:
        words = " ".join([process.name(), *process.cmdline()])
        if process.pid == job.pid:
            return "torchrun"
        if "server_guard" in words:
            return "guard"
        if "resource_tracker" in words:
            return ""
        if "sglang" in words:
            # the name of a process holds 15 characters
            names = {"sglang::schedul": "scheduler", "sglang::detoken": "detokenizer"}
            return names.get(process.name()[:15], "server")
        if "train_async.py" in words and process.ppid() == job.pid:
            return f"rank {process.environ()['RANK']}"
    except (psutil.Error, KeyError):
        pass
    return ""


def server_port(guard: psutil.Process) -> int | None:
    """The HTTP port of a guard's server; its command line stays as it was started."""
    try:
        words = guard.cmdline()
        return int(words[words.index("--port") + 1])
    except (psutil.Error, ValueError, IndexError):
        return None


def own_memory(pid: int) -> int:
    """Resident bytes that are no file's.

    Not psutil's "unique" memory: that of a rank falls while a forked writer shares its pages.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(kib) * 1024


def shared_memory_of(pid: int) -> set[Path]:
    """Files of /dev/shm that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(x[x.index("/dev/shm/") :]) for x in lines if "/dev/shm/" in x}


def semaphores_of_others(files: set[Path]) -> set[Path]:
    """Named semaphores that a living resource tracker may be there to remove: nobody maps them."""
    trackers = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        if "resource_tracker" in " ".join(process.info["cmdline"] or []):
            trackers.append(process.info["create_time"])
    oldest = min(trackers, default=float("inf"))
    return {file for file in files if file.exists() and file.stat().st_ctime >= oldest - 1}

"""The processes of a job in a soak: the part of each, its memory, and the handles that it holds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.chaos import PROGRAM

FILES = "files"
PIPES = "pipes"
ANON_INODES = "anonymous inodes"  # epoll, eventfd, signalfd, ...
CONNECTIONS = "connections to servers"
HALF_CLOSED = "half-closed sockets"  # the other end has gone, ours was not closed
OTHER_SOCKETS = "other sockets"
THREADS = "threads"
SHARED = "files of /dev/shm"
KINDS = (FILES, PIPES, ANON_INODES, CONNECTIONS, HALF_CLOSED, OTHER_SOCKETS, THREADS, SHARED)

# states of /proc/net/tcp
_CLOSE_WAIT = 0x08
_LISTEN = 0x0A


def role(process: psutil.Process, job: psutil.Process) -> str:
    """A name for the part of a process; a short-lived helper (a forked writer) has none: ""."""
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
        if process.ppid() == job.pid and ("train_async.py" in words or PROGRAM in words):
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
    started = [
        process.info["create_time"]
        for process in psutil.process_iter(["cmdline", "create_time"])
        if "resource_tracker" in " ".join(process.info["cmdline"] or [])
    ]
    oldest = min(started, default=float("inf"))
    return {file for file in files if file.exists() and file.stat().st_ctime >= oldest - 1}


class TcpSocket(NamedTuple):
    """One TCP socket of this network namespace; ``remote_port`` 0 where there is no other end."""

    local_port: int
    remote_port: int
    state: int


def tcp_sockets() -> dict[int, TcpSocket]:
    """All TCP sockets by inode, whoever holds them; those without an inode have no holder."""
    found = {}
    for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:  # no IPv6
            _, local, remote, state, *words = line.split()
            ports = [int(end.rsplit(":", 1)[1], 16) for end in (local, remote)]
            found[int(words[5])] = TcpSocket(*ports, int(state, 16))
    found.pop(0, None)
    return found


def open_handles(pid: int) -> list[str]:
    """The target of each descriptor of a process, as /proc spells it; raises OSError."""
    targets = []
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                targets.append(os.readlink(entry.path))
            except FileNotFoundError:  # closed meanwhile
                continue
    return targets


def _socket_inode(target: str) -> int | None:
    return int(target[len("socket:[") : -1]) if target.startswith("socket:[") else None


def count_handles(
    targets: Iterable[str], sockets: Mapping[int, TcpSocket], server_ports: set[int]
) -> Counter[str]:
    """Descriptors by kind.  A connection to a server has a port of ``server_ports`` at either end."""

    def kind(target: str) -> str:
        if target.startswith("pipe:["):
            return PIPES
        if target.startswith("anon_inode:"):
            return ANON_INODES
        inode = _socket_inode(target)
        if inode is None:
            return FILES
        found = sockets.get(inode)
        if found is None or found.state == _LISTEN:  # None: no TCP, or closed meanwhile
            return OTHER_SOCKETS
        if found.state == _CLOSE_WAIT:
            return HALF_CLOSED
        return CONNECTIONS if server_ports & set(found[:2]) else OTHER_SOCKETS

    return Counter(map(kind, targets))


@dataclass
class ListeningSockets:
    """The listening sockets that a job's processes had.

    A socket is known by its inode, so that a stranger who listens on the same port later, or did
    all along, is not taken for the job.
    """

    of_job: dict[int, int] = field(default_factory=dict)  # inode -> port

    def note(self, targets: Iterable[str], sockets: Mapping[int, TcpSocket]) -> None:
        """Remember the sockets on which a living process of the job listens."""
        for inode in map(_socket_inode, targets):
            if inode in sockets and sockets[inode].state == _LISTEN:
                self.of_job[inode] = sockets[inode].local_port

    def left(self) -> list[int]:
        """Ports on which a socket of the job still listens: somebody has inherited it, or lives."""
        sockets = tcp_sockets()
        still = {inode: s.local_port for inode, s in sockets.items() if s.state == _LISTEN}
        return sorted({port for inode, port in self.of_job.items() if still.get(inode) == port})

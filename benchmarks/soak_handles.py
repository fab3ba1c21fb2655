"""What a process holds open, by kind, and which sockets of a job still listen after it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILES = "files"
PIPES = "pipes"
ANON_INODES = "anonymous inodes"  # epoll, eventfd, signalfd, ...
CONNECTIONS = "connections to servers"
HALF_CLOSED = "half-closed sockets"  # the other end has gone, ours was not closed
OTHER_SOCKETS = "other sockets"
KINDS = (FILES, PIPES, ANON_INODES, CONNECTIONS, HALF_CLOSED, OTHER_SOCKETS)

# states of /proc/net/tcp
_CLOSE_WAIT = 0x08
_LISTEN = 0x0A


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One TCP socket of this network namespace; ``remote_port`` 0 where there is no other end."""

    inode: int
    local_port: int
    remote_port: int
    state: int


def tcp_sockets() -> dict[int, TcpSocket]:
    """All TCP sockets by inode, whoever holds them; those without an inode have no holder."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):  # no IPv6
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            inode, ports = int(words[9]), [int(end.rsplit(":", 1)[1], 16) for end in words[1:3]]
            if inode:
                found[inode] = TcpSocket(inode, ports[0], ports[1], int(words[3], 16))
    return found


def open_handles(pid: int) -> list[str]:
    """What each descriptor of a process leads to, as /proc spells it; raises OSError."""
    targets = []
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                targets.append(os.readlink(entry.path))
            except FileNotFoundError:  # closed meanwhile
                continue
    return targets


def socket_inodes(targets: Iterable[str]) -> set[int]:
    return {int(t[len("socket:[") : -1]) for t in targets if t.startswith("socket:[")}


def count_handles(
    targets: Iterable[str], sockets: Mapping[int, TcpSocket], server_ports: set[int]
) -> Counter[str]:
    """Descriptors by kind.  A connection to a server has a port of ``server_ports`` at either end."""
    counts: Counter[str] = Counter()
    for target in targets:
        if target.startswith("pipe:["):
            counts[PIPES] += 1
        elif target.startswith("anon_inode:"):
            counts[ANON_INODES] += 1
        elif target.startswith("socket:["):
            counts[_kind_of_socket(sockets.get(int(target[8:-1])), server_ports)] += 1
        else:
            counts[FILES] += 1
    return counts


def _kind_of_socket(found: TcpSocket | None, server_ports: set[int]) -> str:
    if found is None or found.state == _LISTEN:  # None: no TCP, or closed meanwhile
        return OTHER_SOCKETS
    if found.state == _CLOSE_WAIT:
        return HALF_CLOSED
    if server_ports & {found.local_port, found.remote_port}:
        return CONNECTIONS
    return OTHER_SOCKETS


@dataclass
class ListeningSockets:
    """The listening sockets that a job's processes had.

    A socket is known by its inode, so that a stranger who listens on the same port later, or did
    all along, is not taken for the job.
    """

    of_job: dict[int, int] = field(default_factory=dict)  # inode -> port

    def note(self, targets: Iterable[str], sockets: Mapping[int, TcpSocket]) -> None:
        """Take down what a living process of the job listens on."""
        for inode in socket_inodes(targets):
            found = sockets.get(inode)
            if found is not None and found.state == _LISTEN:
                self.of_job[inode] = found.local_port

    def left(self) -> list[int]:
        """Ports on which a socket of the job still listens: somebody has inherited it, or lives."""
        sockets = tcp_sockets()
        left = {
            port
            for inode, port in self.of_job.items()
            if (found := sockets.get(inode)) is not None
            and (found.state, found.local_port) == (_LISTEN, port)
        }
        return sorted(left)

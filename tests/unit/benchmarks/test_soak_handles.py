"""The soak sees what real processes hold: pipes and sockets that leak, and ports that are left."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.soak_processes import CONNECTIONS, FILES, HALF_CLOSED, OTHER_SOCKETS, PIPES
from benchmarks.soak_processes import ListeningSockets, count_handles, open_handles, tcp_sockets
from benchmarks.soak_traces import HANDLES_WINDOW, SETTLE_S, SETTLE_STEPS, Trace, handles_gathered

# does as it is told, a line at a time, and says when it is done
HOLDER = """
import os, socket, subprocess, sys
held = []
print("ready", flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "pipe":
        held.extend(os.pipe())
    elif what == "connect":
        held.append(socket.create_connection(("127.0.0.1", int(words[0]))))
    elif what == "drop":
        held.pop().close()
    elif what == "pair":
        held.extend(socket.socketpair())
    elif what == "listen":
        held.append(socket.create_server(("127.0.0.1", 0)))
        os.set_inheritable(held[-1].fileno(), True)
    elif what == "child":
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(sleep, close_fds=False, start_new_session=True, stdout=2)
        print(child.pid, flush=True)
        continue
    print(held[-1].getsockname()[1] if what == "listen" else "done", flush=True)
"""


class Holder:
    """A process that opens what it is told to."""

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def tell(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def counts(self, *server_ports: int):
        return count_handles(open_handles(self.process.pid), tcp_sockets(), set(server_ports))


@pytest.fixture
def holder() -> Iterator[Holder]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            process.stdout.readline()  # it opens files while it starts
            yield Holder(process)
        finally:
            process.kill()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listening:
        yield listening


def lived(holder: Holder, port: int, each) -> Trace:
    """The holder through a settled life; ``each(k)`` happens between samples."""
    trace = Trace("rank 0", holder.process.pid)
    trace.add(0.0, 0, 1, holder.counts(port))
    for k in range(3 * HANDLES_WINDOW):
        trace.add(SETTLE_S + k, SETTLE_STEPS + k, 1, holder.counts(port))
        each(k)
    return trace


def test_each_kind_of_handle_is_counted_as_what_it_is(holder, server):
    port = server.getsockname()[1]
    before = holder.counts(port)
    assert before[PIPES] == 2 and before[FILES] == 1 and before.total() == 3
    for line in ("pipe", f"connect {port}", "pair", "listen"):
        holder.tell(line)
    after = holder.counts(port)
    assert after - before == {PIPES: 2, CONNECTIONS: 1, OTHER_SOCKETS: 3}
    assert holder.counts()[OTHER_SOCKETS] == 4, "of another port it is no connection to a server"
    accepted, _ = server.accept()
    accepted.close()
    assert holder.counts(port)[HALF_CLOSED] == 1 and holder.counts(port)[CONNECTIONS] == 0


def test_a_pool_of_connections_that_comes_and_goes_is_no_leak(holder, server):
    port = server.getsockname()[1]

    def each(k):
        for _ in range(5):
            holder.tell(f"connect {port}" if k % 2 == 0 else "drop")

    assert handles_gathered(lived(holder, port, each), max_connections=5) == []


@pytest.mark.parametrize("leak, kind", [("pipe", PIPES), ("pair", OTHER_SOCKETS)])
def test_a_process_that_leaks_is_found(leak, kind, holder, server):
    def each(k):
        if k % 10 == 0:
            holder.tell(leak)

    (text,) = handles_gathered(lived(holder, server.getsockname()[1], each), max_connections=5)
    assert kind in text and "became" in text


def test_a_pool_that_never_gives_a_connection_back_is_found(holder, server):
    port = server.getsockname()[1]

    def each(k):
        if k % 5 == 0:
            holder.tell(f"connect {port}")

    trace = lived(holder, port, each)
    assert handles_gathered(trace, max_connections=12) == []
    (text,) = handles_gathered(trace, max_connections=5)
    assert CONNECTIONS in text and "at most 5" in text


def test_a_listening_socket_that_outlives_its_job_is_found_and_a_strangers_is_not(holder):
    port = int(holder.tell("listen"))
    sockets = ListeningSockets()
    sockets.note(open_handles(holder.process.pid), tcp_sockets())
    assert list(sockets.of_job.values()) == [port]
    child = int(holder.tell("child"))  # it has inherited the socket
    try:
        holder.process.kill()
        holder.process.wait()
        assert sockets.left() == [port]
    finally:
        os.kill(child, 9)
    # nobody waits for it here: its socket goes when it is gone
    with contextlib.suppress(FileNotFoundError):
        while open_handles(child):
            pass
    assert sockets.left() == []
    with socket.create_server(("127.0.0.1", port)):
        assert any(s.local_port == port for s in tcp_sockets().values())
        assert sockets.left() == []

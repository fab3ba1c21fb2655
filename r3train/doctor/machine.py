"""The machine: devices, memory, disk and shared-memory room, ports, servers of others."""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from r3train.doctor.finding import Finding, amount, fact, ok, problem, warning
from r3train.engine.key import ENGINE_KEY_VARIABLE

_SHM = Path("/dev/shm")
_GIB = 1 << 30


def existing_parent(path: Path) -> Path:
    """The nearest directory above ``path`` that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_devices(
    num_gpus: int, gpu_bytes: int, world_size: int, nproc_per_node: int, cores: int
) -> Iterator[Finding]:
    """GPUs against this node's ranks; without any, its ranks against its cores."""
    here = f"{nproc_per_node} of {world_size} ranks on this node"
    if num_gpus:
        yield fact("devices", f"{num_gpus} GPU(s) of {amount(gpu_bytes)}, {here}")
        if nproc_per_node > num_gpus:
            text = f"{nproc_per_node} ranks on this node and {num_gpus} GPU(s)"
            yield problem("devices", text, f"torchrun --nproc-per-node {num_gpus}, or more nodes")
        return
    yield fact("devices", f"no GPU: Megatron and SGLang run on {cores} CPU cores, {here}")
    threads = os.environ.get("OMP_NUM_THREADS")
    if (
        threads is None
        or not threads.isdigit()
        or int(threads) * nproc_per_node > max(cores, nproc_per_node)
    ):
        shown = "unset" if threads is None else threads
        text = f"OMP_NUM_THREADS is {shown}: {nproc_per_node} ranks would fight over {cores} cores"
        yield warning("devices", text, "export OMP_NUM_THREADS=1")


def check_room(
    subject: str, path: Path, needed_bytes: float, *, free_bytes: int | None = None
) -> Iterator[Finding]:
    """Whether ``path`` can be written and has room."""
    there = existing_parent(path)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        text = f"{there}: cannot be written: {error.strerror}"
        yield problem(subject, text, "choose another directory, or free or remount this one")
        return
    free = shutil.disk_usage(there).free if free_bytes is None else free_bytes
    text = f"{there}: {amount(free)} free, about {amount(needed_bytes)} needed"
    if free < needed_bytes:
        yield problem(subject, text, "free room there, or choose another directory")
    else:
        yield ok(subject, text)


def check_shared_memory(nproc_per_node: int, *, free_bytes: int | None = None) -> Iterator[Finding]:
    """/dev/shm holds NCCL's and torch's buffers of this node's ranks; containers often give 64 MiB."""
    if not _SHM.is_dir():
        return
    free = shutil.disk_usage(_SHM).free if free_bytes is None else free_bytes
    needed = max(256 << 20, nproc_per_node * (128 << 20))
    text = f"{_SHM}: {amount(free)} free, about {amount(needed)} needed"
    if free < needed:
        yield problem("shared memory", text, "docker run --shm-size=16g, or mount a larger tmpfs")
    else:
        yield ok("shared memory", text)


def check_port(subject: str, host: str, port: object) -> Iterator[Finding]:
    """Whether a port that the run will listen on is one, and free; ``port`` is as it was given."""
    number = _port_number(port)
    if number is None:
        text = f"{port!r} is no port: expected a number from 1 to 65535"
        yield problem(subject, text, "give another, or unset it")
        return
    port = number
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"choose another, or end who holds it (ss -ltnp 'sport = :{port}')"
            yield problem(subject, f"port {port} of {host} is taken", remedy)
        else:
            text = f"port {port} of {host} cannot be bound: {error.strerror}"
            yield problem(subject, text, "name an address of this machine, and a port above 1023")
        return
    yield ok(subject, f"port {port} of {host} is free")


def _port_number(given: object) -> int | None:
    try:
        number = int(str(given))
    except ValueError:
        return None
    return number if 1 <= number <= 65535 else None


def check_external_server(
    address: str, api_key: str | None = None, *, timeout_s: float = 5.0
) -> Iterator[Finding]:
    """Whether a server of --rollout-external-engine-addrs answers, and takes our key."""
    subject = f"server {address}"
    host, _, port = address.rpartition(":")
    try:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        statuses = []
        for path in ("/health", "/model_info"):  # health is told to everybody
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        remedy = "start it (r3train serve), or mend --rollout-external-engine-addrs"
        yield problem(subject, f"does not answer: {error}", remedy)
        return
    if statuses[1] == 401:
        remedy = f"set {ENGINE_KEY_VARIABLE} to the key that it was started with"
        held = "another one" if api_key else "none"
        yield problem(subject, f"asks for a key, and {held} is set here", remedy)
    elif statuses[0] == 200:
        yield ok(subject, "answers")
    else:
        yield problem(subject, f"/health answers {statuses[0]}", "look at the server's log")


def check_memory(
    available_bytes: float,
    needed_bytes: float,
    *,
    margin_bytes: float = 2 * _GIB,
    subject: str = "memory",
    of_what: str = "",
    remedy: str = "fewer ranks, a smaller model, or a machine with more",
    near: str = "close other programs",
) -> Iterator[Finding]:
    """Memory against what must be held in it: a problem past it, a warning within the margin.

    By default the host's, with ranks and engine on a CPU machine.  of_what: says what is needed.
    near: the remedy of the warning.
    """
    text = f"{amount(available_bytes)} available, about {amount(needed_bytes)} needed{of_what}"
    if available_bytes < needed_bytes:
        yield problem(subject, text, remedy)
    elif available_bytes < needed_bytes + margin_bytes:
        yield warning(subject, f"{text}: less than {amount(margin_bytes)} to spare", near)
    else:
        yield ok(subject, text)

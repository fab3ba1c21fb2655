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
from r3train.rollout.engine_key import ENGINE_KEY_VARIABLE

_SHM = Path("/dev/shm")
_GIB = 1 << 30


def existing_parent(path: Path) -> Path:
    """The nearest directory above ``path`` that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_devices(num_gpus: int, gpu_bytes: int, world_size: int, cores: int) -> Iterator[Finding]:
    """GPUs against ranks; without any, ranks against cores."""
    if num_gpus:
        yield fact("devices", f"{num_gpus} GPU(s) of {amount(gpu_bytes)}")
        if world_size > num_gpus:
            text = f"{world_size} ranks on this node and {num_gpus} GPU(s)"
            yield problem("devices", text, f"torchrun --nproc-per-node {num_gpus}, or more nodes")
        return
    yield fact("devices", f"no GPU: Megatron and SGLang run on {cores} CPU cores")
    threads = os.environ.get("OMP_NUM_THREADS")
    if (
        threads is None
        or not threads.isdigit()
        or int(threads) * world_size > max(cores, world_size)
    ):
        shown = "unset" if threads is None else threads
        text = f"OMP_NUM_THREADS is {shown}: {world_size} ranks would fight over {cores} cores"
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


def check_shared_memory(world_size: int, *, free_bytes: int | None = None) -> Iterator[Finding]:
    """/dev/shm holds NCCL's and torch's buffers; containers often give it 64 MiB."""
    if not _SHM.is_dir():
        return
    free = shutil.disk_usage(_SHM).free if free_bytes is None else free_bytes
    needed = max(256 << 20, world_size * (128 << 20))
    text = f"{_SHM}: {amount(free)} free, about {amount(needed)} needed"
    if free < needed:
        yield problem("shared memory", text, "docker run --shm-size=16g, or mount a larger tmpfs")
    else:
        yield ok("shared memory", text)


def check_port(subject: str, host: str, port: int) -> Iterator[Finding]:
    """Whether a port that the run will listen on is free."""
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
    except (OSError, ValueError, http.client.HTTPException) as error:
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


def check_memory(available_bytes: int, needed_bytes: float) -> Iterator[Finding]:
    """Host memory against what ranks and engine take on a CPU machine."""
    text = f"{amount(available_bytes)} available, about {amount(needed_bytes)} needed"
    if available_bytes < needed_bytes:
        yield problem("memory", text, "fewer ranks, a smaller model, or a machine with more")
    elif available_bytes < needed_bytes + 2 * _GIB:
        yield warning("memory", text, "close other programs: the margin is below 2 GiB")
    else:
        yield ok("memory", text)

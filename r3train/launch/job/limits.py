"""Ports, file descriptors, memory and trackers: what a start takes of its node.

A check of one thing returns what is wrong and a remedy, or None.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.cuda_environment import visible_gpus
from r3train.engine.addresses import LOOPBACK
from r3train.launch.estimate.memory_use import host_bytes, Model, stages
from r3train.launch.gpus import torchruns_number
from r3train.launch.job.finding import Findings, ok, problem, PROBLEM, room, warning, WARNING
from r3train.observe.sinks import tracker_lacks

Lack = tuple[str, str]

SHARED_MEMORY = Path("/dev/shm")
# a server ends within some seconds of its rank 0
_PORT_FREED_S = 20.0
# descriptors of rank 0 next to its requests' (166 were counted)
_OTHER_FILES = 200


def check_node(config: RunConfig) -> Findings:
    """Check that rank 0's node has the ports, file descriptors and devices of a start.

    Waits a little for the ports where torchrun has started the job again: its last servers may still be
    about to end.  A dry run may be on another machine than the start will be: what is a port nowhere is a
    problem then, and the rest a warning.
    """
    restarted = torchruns_number("TORCHELASTIC_RESTART_COUNT", 0) > 0
    until, (host, ports) = time.monotonic() + restarted * _PORT_FREED_S, server_ports(config)
    while any(taken_port(host, port) for port in ports) and time.monotonic() < until:
        time.sleep(0.2)
    lacks = [taken_port(host, port) for port in dict.fromkeys(ports)]
    numbers = [str(port) for port in ports]
    for port in sorted({number for number in numbers if numbers.count(number) > 1}):
        text = f"port {port} is asked for twice by the servers of this run"
        lacks.append((text, "unset --sglang-nccl-port: servers choose free ones"))
    if config.has_engines and not ports and not config.rollout.has_external_servers:
        lacks.append(no_address(host))
    if config.has_engines and not config.rollout.has_external_servers:
        lacks.append(long_tmpdir())
    if metrics_port := config.trackers.metrics_port:
        lacks.append(taken_port(LOOPBACK, metrics_port))
    if config.has_engines:
        lacks.append(few_files(config.rollout.most_in_flight))
    lacks += [*device_lacks(config), *tracker_lacks(config)]
    found = [*filter(None, lacks)]
    if not config.run.dry_run:
        yield from (problem("machine", *lack) for lack in found)
        return
    nowhere = [*filter(None, map(no_port, ports))]
    yield from (problem("machine", *lack) for lack in nowhere)
    yield from (warning("machine", *lack) for lack in found if lack not in nowhere)


def device_lacks(config: RunConfig) -> Iterator[Lack]:
    """Yield what the settings need of CUDA where no CUDA device is visible."""
    if visible_gpus():
        return
    backend, attention = config.parallel.distributed_backend, config.model.attention_backend
    if backend == "nccl":
        text = "--distributed-backend nccl needs CUDA devices, and none is visible here"
        yield text, "take auto, or gloo on a CPU"
    if attention not in ("auto", "local") and find_spec("transformer_engine") is None:
        text = (
            f"--attention-backend {attention} needs transformer_engine, which is not installed here"
        )
        yield text, "take auto, or see r3train docs installation"


def no_port(port: object) -> Lack | None:
    """Refuse what is a port on no machine."""
    if str(port).isdecimal() and str(port).isascii() and 1 <= int(str(port)) <= 65535:
        return None
    return f"{port!r} is no port: expected a number from 1 to 65535", "give another, or unset it"


def taken_port(host: str, port: object) -> Lack | None:
    """Try to listen on ``port``, given as a number or as text, of an address of this node."""
    if lack := no_port(port):
        return lack
    try:
        _bind(host, int(str(port)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"choose another, or end who holds it (ss -ltnp 'sport = :{port}')"
            return f"port {port} of {host} is taken", remedy
        text = f"port {port} of {host} cannot be bound: {error.strerror}"
        return text, "name an address of this machine, and a port above 1023"
    return None


def no_address(host: str) -> Lack | None:
    """Try to listen on any port of an address of this node."""
    try:
        _bind(host, 0)
    except OSError as error:
        text = f"{host!r} is no address of this machine ({error.strerror})"
        return text, "name one with --sglang-host, or unset it"
    return None


def _bind(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))


def server_ports(config: RunConfig) -> tuple[str, list[object]]:
    """The address and the ports of the servers that a run starts, [] where they choose their own."""
    rollout = config.rollout
    starts_servers = config.has_engines and not rollout.has_external_servers
    host, count = str(rollout.sglang.get("host", LOOPBACK)), rollout.rollout_num_engines
    first, meeting = (
        rollout.sglang.get(name) if starts_servers else None for name in ("port", "nccl_port")
    )
    ports: list[object] = [] if first is None else [first]
    if str(first).isdecimal():
        ports = [int(str(first)) + index for index in range(count)]
    return host, ports + ([] if meeting is None else [meeting] * count)


def needed_files(num_requests: int) -> str:
    """Say how many descriptors the requests in flight and the rest need."""
    needed = num_requests + _OTHER_FILES
    return f"{num_requests:,} requests in flight and the rest need about {needed:,} open files"


def few_files(num_requests: int) -> Lack | None:
    """Hold every request in flight, a connection, against the hard limit; a run raises its soft one to that."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= num_requests + _OTHER_FILES:
        return None
    remedy = "raise the hard limit (LimitNOFILE, limits.conf), or lower --rollout-max-concurrency"
    return f"{needed_files(num_requests)}, at most {hard:,} are allowed here", remedy


def long_tmpdir() -> Lack | None:
    """Hold the paths of a server's sockets, in a directory of its own in TMPDIR, against what the kernel takes."""
    directory, most = tempfile.gettempdir(), 107 - len("/r3t-XXXXXXXX/tmpXXXXXXXX")
    if (count := len(os.fsencode(directory))) <= most:
        return None
    text = f"TMPDIR {directory} is {count} bytes long, and a server's sockets need at most {most}"
    return text, "name a shorter one on this node, such as /tmp"


def shared_memory_bytes(num_ranks: int) -> int:
    """The bytes of /dev/shm in which NCCL and torch have buffers for each rank of a node."""
    return max(256 << 20, num_ranks * (128 << 20))


def check_shared_memory(num_ranks: int) -> Findings:
    """Hold the buffers of a node's ranks against /dev/shm, of which containers often give 64 MiB."""
    if not SHARED_MEMORY.is_dir():
        return
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, shared_memory_bytes(num_ranks)
    text = f"{SHARED_MEMORY} has {free >> 20:,} MiB, the ranks need about {needed >> 20:,} MiB"
    if free < needed:
        yield warning("shared memory", text, "docker run --shm-size=16g, or mount a larger tmpfs")
    else:
        yield ok("shared memory", text)


def check_memory(config: RunConfig, hf: HfModelFacts, world_size: int, num_ranks: int) -> Findings:
    """Hold what a node's ranks and their servers need of its memory against what is free.

    A problem where a start here would need more than the node has at all.
    """
    try:
        model = Model(hf, config.lora)
        fullest = max(stages(config, model, world_size), key=lambda stage: stage.total)
    except ValueError:  # which other checks refuse
        return
    parts = host_bytes(config, model, fullest, world_size, num_ranks, bool(visible_gpus()))
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    remedy = "fewer ranks, a smaller model, a machine with more memory, or end other programs"
    finding = room("memory", "the host", memory.available, parts, remedy)
    fits = config.run.dry_run or sum(parts.values()) <= memory.total + swap.total
    yield replace(finding, level=WARNING) if finding.level == PROBLEM and fits else finding

"""The machine: installed versions, devices, disk, shared memory, ports, servers of others."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from r3train.engine.refusals import SGLANG_RELEASE
from r3train.launch.estimate.memory_use import amount
from r3train.launch.job.finding import Finding, Findings, fact, ok, problem, room, warning
from r3train.launch.job.limits import taken_port

# measured with r3train: another version may have moved the seams
PINNED = {
    "megatron-core": ("0.19.2", "the router's replay seam and the CPU adaptation"),
    "sglang": (SGLANG_RELEASE, "routed experts on the wire and weight updates"),
    "transformers": ("5.19.0", "the version that sglang requires"),
}


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


# by distribution: whether a version is bad, its level, why, the remedy
CONFLICTS: dict[str, tuple[Callable[[str], bool], Callable[..., Finding], str, str]] = {
    "torchvision": (
        lambda version: version.endswith("+cpu"),
        problem,
        "it defines ops that r3train declares for sglang's import: a second definition",
        "pip install --no-deps torchvision===0.28.0 (PyPI's build, see r3train docs dependencies)",
    ),
    "vllm": (
        lambda version: True,
        warning,
        "in the same environment it pins another torch and transformers",
        "give it an environment of its own",
    ),
    "transformer-engine": (
        lambda version: _major_minor(version) != (2, 12),
        problem,
        "2.12 was looked at; 2.11 has no attention with sinks for packed sequences, and newer ones are not known",
        "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]==2.12.0'",
    ),
    "numpy": (
        lambda version: _major_minor(version) < (2, 0),
        problem,
        "r3train needs 2.0, and wheels built for 1.x break next to it",
        "pip install 'numpy>=2.0'",
    ),
}


@dataclass(frozen=True)
class Node:
    """This node's GPUs, and its share of the job's ranks."""

    num_gpus: int
    gpu_bytes: int  # of the smallest GPU
    world_size: int  # ranks on all nodes
    num_ranks: int  # ranks on this node


def installed_version(name: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_versions(
    version_of: Callable[[str], str | None] = installed_version,
    python: tuple[int, int] = sys.version_info[:2],
    cuda: bool = False,
) -> Findings:
    """Installed versions against the pins and against conflicts that were met."""
    found = list(_version_conflicts(version_of, python, cuda))
    yield from found
    if not found:
        names = (f"{name} {version_of(name)}" for name in ("torch", *PINNED))
        yield ok("versions", ", ".join(names))


def _version_conflicts(version_of, python: tuple[int, int], cuda: bool) -> Findings:
    if not (3, 11) <= python <= (3, 12):
        text = f"Python {python[0]}.{python[1]}, r3train runs on 3.11 and 3.12"
        yield problem("Python", text, "make PYTHON=python3.12 venv")
    elif cuda and python != (3, 12):
        text = f"Python {python[0]}.{python[1]}: requirements/gpu.txt is a lock of 3.12 only"
        yield warning("Python", text, "an environment of Python 3.12 (r3train docs installation)")
    for name, (wanted, why) in PINNED.items():
        have = version_of(name) or "not installed"
        if have.split("+")[0] != wanted:
            remedy = f"pip install {name}=={wanted} (make venv does it all)"
            yield problem(name, f"{have}, measured on {wanted} ({why})", remedy)
    torch = version_of("torch") or "not installed"
    if not (2, 14 if cuda else 13) <= _major_minor(torch) <= (2, 14):
        text = f"{torch}, needs 2.14.1 with a GPU (sglang 0.5.23) and 2.13 without"
        yield problem("torch", text, f"pip install torch=={'2.14.1' if cuda else '2.13.0'}")
    elif not cuda and "+cu" in torch:
        text = f"{torch} is a CUDA build and no GPU is visible"
        yield warning("torch", text, "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    for name, (is_bad, kind, why, remedy) in CONFLICTS.items():
        if (have := version_of(name)) and is_bad(have):
            yield kind(name, f"{have}: {why}", remedy)


def check_devices(node: Node, cores: int) -> Findings:
    """This node's ranks against its GPUs, or against its cores where it has none."""
    ranks, gpus = node.num_ranks, node.num_gpus
    here = f"{ranks} of {node.world_size} ranks on this node"
    if gpus:
        yield fact("devices", f"{gpus} GPU(s) of {amount(node.gpu_bytes)}, {here}")
        if ranks > gpus:
            text = f"{ranks} ranks on this node and {gpus} GPU(s)"
            yield problem("devices", text, f"torchrun --nproc-per-node {gpus}, or more nodes")
        return
    yield fact("devices", f"no GPU: Megatron and SGLang run on {cores} CPU cores, {here}")
    threads = os.environ.get("OMP_NUM_THREADS", "")  # unset, ranks share the cores
    if threads.isdigit() and int(threads) * ranks > max(cores, ranks):
        text = f"OMP_NUM_THREADS is {threads}: {ranks} ranks would fight over {cores} cores"
        yield warning("devices", text, "unset it")


def check_capability(num_gpus: int) -> Findings:
    """The GPUs here against Transformer Engine 2.12's fused attention of packed sequences."""
    if not num_gpus:
        return
    import torch

    here = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    for major, minor in sorted(here):
        if major < 9 or major == 12:
            text = (
                f"compute capability {major}.{minor}: Transformer Engine has no fused attention of packed sequences"
                " there; the unfused one keeps scores, which grow with the square of a pack's tokens and are in no"
                " estimate of memory, and it cannot run context parallelism"
            )
            yield warning("GPU", text, "an H100, H200 or B200, or a small --max-tokens-per-gpu")


def first_card() -> str | None:
    """Return the name of the first GPU, as torch has it; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def check_transformer_engine(num_gpus: int) -> Findings:
    """Its part for torch, which is compiled where it is installed."""
    if not num_gpus:
        return
    from r3train.cpu.device import uses_transformer_engine  # it imports torch

    try:
        uses_transformer_engine("te", on_cuda=True)
    except ValueError as error:
        remedy = "compile it against the torch that is here (r3train docs installation)"
        yield problem("Transformer Engine", str(error), remedy)
    else:
        yield ok("Transformer Engine", "its part for torch imports")


def existing_parent(path: Path) -> Path:
    """``path``, or its nearest parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def check_disk(subject: str, path: Path, parts: Mapping[str, float]) -> Findings:
    """``path``, or its nearest parent that exists, must have room; preflight says if none can be made."""
    there = existing_parent(path)
    remedy = "free room there, or choose another directory"
    yield room(subject, str(there), shutil.disk_usage(there).free, parts, remedy)


def check_port(subject: str, host: str, port: object) -> Findings:
    """The run must be able to listen on ``port``, given as a number or as text."""
    lack = taken_port(host, port)
    yield problem(subject, *lack) if lack else ok(subject, f"port {port} of {host} is free")

"""Fetch what a machine with one GPU and no network lacks, and print what to run there: ``make lent``.

    python -m tests.gpu.lent_wheels DIRECTORY

The machine has Linux, Python 3.12, torch 2.11 or newer for CUDA 13, its Triton, transformers 5, aiohttp and cupy;
it gets the checkout and DIRECTORY.  Wheels are of the versions that requirements/ pins.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 64 << 20
# what r3train's ranks import, without what such a machine has
_TRAINER = (
    "annotated-types antlr4-python3-runtime latex2sympy2_extended math-verify megatron-core msgspec orjson"
    " pybase64 pydantic pydantic_core tomli_w typing-inspection"
).split()
_KERNELS = ("fla-core",)
# on a path of its own: tests/rehearsal/stand_ins has a package of its name
_ENGINE = ("transformer-engine",)
_PLATFORMS = tuple(f"manylinux{of}_x86_64" for of in ("2014", "_2_17", "_2_27", "_2_28"))


@dataclass(frozen=True)
class Call:
    """A command there, its minutes, what it shows, and when to stop."""

    command: str
    minutes: int
    shows: str
    stop: str


_PART = "python -m tests.gpu.lent_h100"
CALLS = (
    Call(
        f"{_PART} facts && python -m pytest tests/gpu -rs",
        1,
        "the card, its libraries; fingerprints and filling on the device",
        "a test fails",
    ),
    Call(
        f"for T in float32 bfloat16; do CUDA_VISIBLE_DEVICES= {_PART} actor /tmp/host-$T.pt $T"
        f" && {_PART} actor /tmp/gpu-$T.pt $T && {_PART} compare /tmp/host-$T.pt /tmp/gpu-$T.pt || exit 1; done",
        3,
        "the whole actor on the device: replay, evidence, a step; launches and waits of one, a turn to the host",
        "evidence differs, or a log-prob by 1e-3 nats in float32, 0.25 in bfloat16",
    ),
    Call(
        f"{_PART} permute /tmp/engine",
        1,
        "Transformer Engine's permutation, compiled",
        "a row differs; below 1,000 GB/s fusing is worth a look",
    ),
    Call(
        f"{_PART} fla",
        2,
        "the gated delta rule, compiled, against its twin in float32, with gradients",
        "an error of 0.005 in float32 or 0.04 in bfloat16",
    ),
    Call(
        f"{_PART} rates",
        1,
        "GB/s of pinned, pageable and shared host memory, Adam on the host",
        "never: 40 GB/s to registered memory is what a publish of the colocated recipes counts on",
    ),
    Call(
        f"{_PART} ipc",
        1,
        "a handle of device memory, opened by another process",
        "bytes differ: weights by handles are not to be built",
    ),
)


def pins(names: tuple[str, ...] | list[str]) -> list[str]:
    """Return NAME==VERSION of each, by the lock for GPUs or else the CPU's; raises ValueError for one in neither."""
    files = [(ROOT / f"requirements/{name}.txt").read_text() for name in ("gpu", "constraints")]
    found = []
    for name in names:
        spelled = re.sub(r"[-_]", "[-_]", name)
        lines = [re.search(rf"^{spelled}==\S+", text, re.M | re.I) for text in files]
        pinned = next((line[0] for line in lines if line), None)
        if pinned is None:
            raise ValueError(
                f"requirements/gpu.txt, constraints.txt: no pin of {name}, expected one"
            )
        found.append(pinned)
    return found


def fetch(directory: Path) -> int:
    """Download the wheels for Python 3.12 into DIRECTORY and DIRECTORY/engine; returns their bytes."""
    for folder, names in ((directory, [*_TRAINER, *_KERNELS]), (directory / "engine", _ENGINE)):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        target = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
        target += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target]
        subprocess.run([*download, "--dest", str(folder), *pins(names)], check=True)
    return sum(file.stat().st_size for file in directory.rglob("*.whl"))


def setup(directory: Path) -> str:
    """Return the command that every call there begins with."""
    install = "python -m pip install -q --no-index --no-deps --target"
    return (
        f"{install} /tmp/site {directory}/*.whl && {install} /tmp/engine {directory}/engine/*.whl"
        " && export PYTHONPATH=/tmp/site:$PWD:$PWD/tests/rehearsal/stand_ins"
    )


def main(directory: Path) -> int:
    num_bytes = fetch(directory)
    print(f"{num_bytes / 1e6:.1f} MB of wheels in {directory}")
    if num_bytes > MOST_BYTES:
        print(f"expected at most {MOST_BYTES / 1e6:.0f} MB")
        return 1
    print(f"in the checkout there, before each call:\n\n  {setup(directory)}\n")
    for number, call in enumerate(CALLS, start=1):
        print(
            f"{number}. {call.shows} ({call.minutes} min)\n   stop: {call.stop}\n\n  {call.command}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

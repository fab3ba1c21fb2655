"""Versions that r3train was built on, and those that are known to break each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from r3train.doctor.finding import Finding, ok, problem, warning

# what the seams were measured on: another version may have moved them
PINNED = {
    "megatron-core": ("0.16.1", "the router's replay seam and the CPU adaptation"),
    "sglang": ("0.5.23", "routed experts on the wire and weight updates"),
    "transformers": ("5.19.0", "the version that sglang requires"),
    "mbridge": ("0.15.1", "Megatron's names for Hugging Face weights"),
}
_INSTALL = "pip install {0}=={1} (make venv does it all)"


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
) -> Iterator[Finding]:
    """Compare with the pins and with conflicts that were met; ``version_of`` answers by name."""
    found = []
    if not (3, 11) <= python <= (3, 12):
        text = f"Python {python[0]}.{python[1]}, r3train runs on 3.11 and 3.12"
        found.append(problem("Python", text, "make PYTHON=python3.12 venv"))
    for name, (wanted, why) in PINNED.items():
        version = version_of(name)
        if version is None:
            text = f"not installed ({why})"
            found.append(problem(name, text, _INSTALL.format(name, wanted)))
        elif version.split("+")[0] != wanted:
            text = f"{version}, measured on {wanted} ({why})"
            found.append(problem(name, text, _INSTALL.format(name, wanted)))
    torch = version_of("torch")
    if torch is None:
        found.append(problem("torch", "not installed", "make venv"))
    elif not (2, 13) <= _major_minor(torch) <= (2, 14):
        text = f"{torch}, needs 2.13 (CPU) or 2.14 (GPU)"
        found.append(
            problem("torch", text, "pip install torch==" + ("2.14.1" if cuda else "2.13.0"))
        )
    elif cuda and _major_minor(torch) != (2, 14):
        text = f"{torch} with a GPU: sglang 0.5.23 with CUDA requires 2.14.1"
        found.append(problem("torch", text, "pip install torch==2.14.1"))
    elif not cuda and "+cu" in torch:
        text = f"{torch} is a CUDA build and no GPU is visible"
        found.append(warning("torch", text, "look at nvidia-smi and CUDA_VISIBLE_DEVICES"))
    vision = version_of("torchvision")
    if vision is not None and vision.endswith("+cpu"):
        text = (
            f"{vision} defines ops that r3train declares for sglang's import: a second definition"
        )
        remedy = (
            "pip install --no-deps torchvision===0.28.0 (PyPI's build, see docs/dependencies.md)"
        )
        found.append(problem("torchvision", text, remedy))
    for name in ("ray", "vllm"):  # neither is used; vllm pins a torch of its own
        if name == "vllm" and version_of(name) is not None:
            text = f"{version_of(name)} in the same environment pins another torch and transformers"
            found.append(warning(name, text, "give it an environment of its own"))
    engine = version_of("transformer-engine")
    if engine is not None and _major_minor(engine) >= (2, 12):
        text = f"{engine}: megatron-core 0.16.1 asks for Transformer Engine below 2.12"
        found.append(problem("transformer-engine", text, "pip install transformer-engine==2.11.0"))
    numpy = version_of("numpy")
    if numpy is not None and _major_minor(numpy) < (2, 0):
        text = f"numpy {numpy}: r3train needs 2.0, and wheels built for 1.x break beside it"
        found.append(problem("numpy", text, "pip install 'numpy>=2.0'"))
    yield from found
    if not found:
        names = [f"{n} {version_of(n)}" for n in ("torch", *PINNED)]
        yield ok("versions", ", ".join(names))


def _major_minor(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)[:2]
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0

"""Lock files, the image and pyproject.toml name the same versions."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.gpu_smoke import STEPS
from r3train.config import RunConfig
from r3train.doctor.machine import CONFLICTS
from r3train.launch.job.model_checks import check_sinks

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN, GPU = PROJECT["dependencies"], EXTRAS["gpu"]
# installed apart on a CPU, by nodeps.txt
APART = {"sglang"}


def pins(*files: str) -> dict[str, str]:
    """Versions by name; every line must be a pin."""
    found = {}
    for file in files:
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            line = line.partition("#")[0].strip()
            if line:
                name, version = re.fullmatch(r"([\w.\[\],-]+)===?([\w.+]+)", line).groups()
                found[canonicalize_name(name)] = version
    return found


def unmet(requirements: list[str], locked: dict[str, str]) -> list[str]:
    """Requirements that the pins do not meet, with the pin."""
    wanted = [Requirement(text) for text in requirements]
    names = [canonicalize_name(need.name) for need in wanted]
    return [
        f"{need}: {locked.get(name)}"
        for name, need in zip(names, wanted)
        if name not in locked or not need.specifier.contains(locked[name], prereleases=True)
    ]


def test_the_lock_for_gpus_meets_pyproject():
    assert unmet([*OWN, *GPU], pins("gpu.txt")) == []


def test_the_pins_for_a_cpu_meet_pyproject():
    assert unmet([*OWN, *EXTRAS["dev"]], pins("constraints.txt")) == []
    assert pins("cpu.txt", "dev.txt").items() <= pins("constraints.txt").items()
    assert [need for need in GPU if need.startswith("sglang")] == [
        f"sglang=={pins('nodeps.txt')['sglang']}"
    ]


@pytest.mark.parametrize("need", ["torch==2.14.0", "not-there>=1", "numpy<2"])
def test_a_lock_of_another_version_is_found(need):
    assert unmet([need], pins("gpu.txt"))


def test_both_locks_hold_the_same_megatron_and_transformers():
    gpu, cpu = pins("gpu.txt"), pins("constraints.txt")
    for name in ("megatron-core", "transformers", "tokenizers", "safetensors"):
        assert gpu[name] == cpu[name]


def test_the_lock_for_gpus_is_of_one_cuda():
    names = pins("gpu.txt")
    assert "transformer-engine-cu13" in names
    assert not [
        name for name in names if re.search(r"^(nvidia-\w+|transformer-engine)-cu12$", name)
    ]


def test_the_doctor_takes_the_transformer_engine_of_the_lock_which_has_sinks_for_packed_sequences():
    locked = pins("gpu.txt")["transformer-engine"]
    is_bad, *_ = CONFLICTS["transformer-engine"]
    assert not is_bad(locked)
    check_sinks("gpt_oss", locked, RunConfig.from_toml(ROOT / "configs/gpt_oss_20b.toml"))
    # without which 2.12 computes scores of packed sequences with sinks as a square
    assert Version(pins("gpu.txt")["nvidia-cudnn-cu13"]) >= Version("9.18")


def test_the_image_is_sglangs_of_the_pinned_release_and_copies_what_is_there():
    text = (ROOT / "docker/Dockerfile").read_text()
    (tag,) = re.findall(r"^FROM lmsysorg/sglang:v(.+)$", text, re.M)
    assert f"sglang=={tag}" in GPU
    assert f"lmsysorg/sglang:v{tag}" in (ROOT / "docs/start/installation.md").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
    assert len(copied) > 8 and all((ROOT / path).exists() for path in copied)


def image_packages() -> set[str]:
    """Distributions that the image and the environment of docs/start/installation.md have: the lock's and the tools'."""
    commands = [
        re.findall(r"pip install .*-c requirements/dev\.txt -e \S+ (.+)$", text, re.M)
        for text in (
            (ROOT / "docker/Dockerfile").read_text(),
            (ROOT / "docs/start/installation.md").read_text(),
        )
    ]
    assert commands[0] == commands[1] and len(commands[0]) == 1, commands
    found, waiting = {"r3train", *pins("gpu.txt")}, commands[0][0].split()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, distribution(name).requires or ())
            waiting += [n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
    return found


COLLECT = """
import importlib, importlib.abc, importlib.metadata, json, sys
import pytest
from packaging.utils import canonicalize_name
there = set(json.loads(sys.argv[1]))
# here, where nothing has put what setuptools brings along on the path
hidden = {
    module
    for module, names in importlib.metadata.packages_distributions().items()
    if not there & set(map(canonicalize_name, names))
}
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"the image has no {name}", name=name)
sys.meta_path.insert(0, Hide())
modules = sys.argv[2].split()
for module in modules:
    importlib.import_module(module)
sys.exit(pytest.main(["--collect-only", "-q", "-p", "pytest_timeout", "-p", "pytest_asyncio", "tests/gpu"]))
"""


@pytest.mark.parametrize("lacking", ["", "hypothesis"])
def test_the_first_day_imports_nothing_that_the_image_lacks(lacking):
    """Tests and benchmarks of its steps are imported while every other distribution is hidden."""
    there = image_packages() - {lacking}
    words = [shlex.split(step.command) for step in STEPS]
    modules = {w[2] for w in words if w[:2] == ["python", "-m"] and w[2].startswith("benchmarks.")}
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(sorted(there)), " ".join(sorted(modules))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert len(modules) == 5 and (done.returncode == 0) == (not lacking), done.stdout + done.stderr
    assert f"the image has no {lacking}" in done.stdout + done.stderr or not lacking


def test_plan_b_is_the_lock_with_another_transformer_engine(tmp_path):
    """The command of docs/start/installation.md; the newer version asks for nothing that the lock lacks (uv resolved it)."""
    page = (ROOT / "docs/start/installation.md").read_text()
    (command,) = re.findall(r"^sed .* > gpu_b\.txt$", page, re.M)
    (wanted,) = set(re.findall(r"'transformer-engine\[core_cu13,pytorch\]==([\d.]+)' -e \.`", page))
    (tmp_path / "requirements").mkdir()
    lock = (ROOT / "requirements/gpu.txt").read_text()
    (tmp_path / "requirements/gpu.txt").write_text(lock)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    lines = lock.splitlines(), (tmp_path / "gpu_b.txt").read_text().splitlines()
    changed = [(old, new) for old, new in zip(*lines, strict=True) if old != new]
    own = "transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"
    old = pins("gpu.txt")["transformer-engine"]
    assert changed == [(f"{name}=={old}", f"{name}=={wanted}") for name in own]

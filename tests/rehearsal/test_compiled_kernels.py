"""The trainer's Triton kernels compile for Hopper and Blackwell, within their shared memory.  No GPU is needed.

Compiling says nothing of what a kernel computes.  The packages are in no environment of the CPU: pip fetches three wheels
(250 MB, of which Triton is nearly all) in the versions of requirements/gpu.txt.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fla-core", "transformer-engine", "triton")
each_card = pytest.mark.parametrize("card", ("H100", "B200"))


def compiled(directory: Path, card: str, *words: str, packages: Path | None = None) -> dict:
    """The report of ``compiled_kernels``, whose cache of compiled kernels begins empty."""
    report = directory / f"{card}.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.compiled_kernels"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FLA_TILELANG": "0"}
    env["TRITON_CACHE_DIR"] = str(directory / "cache")
    if packages is not None:
        searched = (str(packages), env.get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
    done = subprocess.run(
        [*command, str(report), card, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A directory with the packages of kernels, without what they require."""
    folder = tmp_path_factory.mktemp("packages")
    locked = (ROOT / "requirements/gpu.txt").read_text()
    pins = [re.search(rf"^{name}==\S+", locked, re.M)[0] for name in PACKAGES]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command = [*install, "--only-binary=:all:", "--target", str(folder), *pins]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"not run: {' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return folder


@each_card
def test_every_kernel_compiles_for_a_card_that_is_not_there(card, packages, tmp_path):
    found = compiled(tmp_path, card, packages=packages)
    builds = found["builds"]
    count, most = sum(map(len, builds.values())), max(map(max, builds.values()))
    print(f"{card}, Triton {found['triton']}: {count} builds of {len(builds)} kernels, at most")
    print(f"{most:,} of {found['shared']:,} bytes of shared memory")
    assert not found["failures"], json.dumps(found["failures"], indent=1)
    assert {"_permute_kernel", "_unpermute_kernel"} < builds.keys(), sorted(builds)
    assert any("gated_delta_rule" in name for name in builds), sorted(builds)
    assert count > 150 and most <= found["shared"]


@each_card
def test_a_kernel_that_the_card_cannot_run_is_named(card, tmp_path):
    found = compiled(tmp_path, card, "planted")
    failures = found["failures"]
    too_much = failures.pop("too_much_shared_memory")
    if card == "H100":
        assert "out of resource: shared memory" in too_much
        assert "e2m1x2" in failures.pop("an_instruction_of_blackwell")
    else:
        assert found["builds"].keys() == {"an_instruction_of_blackwell"}
    assert not failures

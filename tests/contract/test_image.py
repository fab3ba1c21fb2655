"""The image: one cuDNN, and containers in which NCCL may lock memory and reach other nodes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"


def command(start: str) -> str:
    """The shell command of the one RUN instruction that begins so."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    (found,) = [line for line in text.splitlines() if line.startswith(f"RUN {start}")]
    return found.removeprefix("RUN ")


@pytest.mark.parametrize(
    "packages, libraries, purged, passes",
    [
        ("ii libcudnn9-cuda-13\\nun libcudnn8\\nhi libcudnn9-dev-cuda-13\\n", "", True, True),
        ("un libcudnn9-cuda-13\\n", "", False, True),
        ("", "", False, True),
        ("", "libcudnn.so.9 (libc6) => /opt/other/libcudnn.so.9", False, False),
        (
            "",
            "libcudnn.so.9 (libc6) => /usr/lib/python3/nvidia/cudnn/lib/libcudnn.so.9",
            False,
            True,
        ),
    ],
)
def test_the_build_purges_apts_cudnn_and_ends_where_another_is_left(
    packages, libraries, purged, passes, tmp_path
):
    programs = {
        "dpkg-query": f"[ \"$4\" = 'libcudnn*' ] && printf '{packages}'",
        "apt-get": f'echo "$@" > {tmp_path}/called',
        "ldconfig": f"[ \"$1\" = -p ] && echo '{libraries}'; exit 0",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", "-c", command("dpkg-query")], env=environment, timeout=60)
    assert (done.returncode == 0) == passes
    called = tmp_path / "called"
    assert called.exists() == purged
    if purged:
        names = "libcudnn9-cuda-13 libcudnn9-dev-cuda-13"
        assert called.read_text() == f"purge -y --allow-change-held-packages {names}\n"


def test_transformer_engine_looks_for_cudnn_where_pip_has_put_it():
    """Its loader takes CUDNN_HOME first; the folder of the packages is known in the build only."""
    (home,) = re.findall(r"^\s+CUDNN_HOME=(\S+)$", DOCKERFILE.read_text(), re.M)
    assert f'ln -s "$packages/nvidia/cudnn" {home} ' in command("rm -rf")
    installation = (ROOT / "docs/start/installation.md").read_text()
    assert "\nexport CUDNN_HOME=$packages/nvidia/cudnn " in installation


def test_every_container_that_a_page_starts_may_lock_memory():
    pages = [DOCKERFILE, *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    starts = [line for line in lines if "docker run --rm" in line]
    assert starts
    for line in starts:
        for flag in ("--gpus all", "--ipc=host", "--ulimit memlock=-1", "--ulimit stack=67108864"):
            assert flag in line, line


def test_what_the_doctor_finds_without_a_gpu_does_not_end_the_build(tmp_path):
    """An hour of compiling is before it."""
    (tmp_path / "r3train").write_text('#!/bin/sh\necho "$@" > "$0.called"\nexit 1\n')
    (tmp_path / "r3train").chmod(0o755)
    step = command("--mount=type=tmpfs").partition(" ")[2]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", "-c", step], env=environment, timeout=60)
    assert done.returncode == 0 and (tmp_path / "r3train.called").read_text() == "doctor\n"

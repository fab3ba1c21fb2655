"""A wheel, installed without the checkout and run somewhere else, trains the demo to its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from tests.e2e import jobs

pytestmark = pytest.mark.e2e


def run(command: list[object], cwd: Path, **variables: str) -> str:
    """The output of a command that must succeed, in an environment that knows no checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """bin/ of a virtual environment with the wheel; what r3train needs is the tests' own."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("r3train", "configs", "docs"):
        shutil.copytree(
            jobs.ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE", "r3train.schema.json"):
        shutil.copy(jobs.ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run([*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", wheels], source)
    (wheel,) = wheels.glob("r3train-*.whl")
    shutil.rmtree(source)
    home = tmp_path_factory.mktemp("home") / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], wheels)
    (site,) = home.glob("lib/python3*/site-packages")
    # as a path: its own .pth files, which would bring the checkout, are not read
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_an_installed_wheel_trains_the_demo_outside_of_the_checkout(installed, tmp_path):
    where = run([installed / "python", "-c", "import r3train; print(r3train.__file__)"], tmp_path)
    assert str(installed.parent) in where and str(jobs.ROOT) not in where
    listed = run([installed / "r3train", "recipes"], tmp_path).splitlines()
    assert {line.split()[0] for line in listed if line[0] != " "} == {
        file.stem for file in (jobs.ROOT / "configs").glob("*.toml")
    }
    (package,) = installed.parent.glob("lib/python3*/site-packages/r3train")
    for recipe in (package / "recipes").glob("*.toml"):
        first = recipe.read_text().splitlines()[0]
        schema = recipe.parent / first.removeprefix("#:schema ")
        assert json.loads(schema.read_text())["title"] == "r3train"
    assert not list(package.glob("pages/*.py")) and "# Models" in run(
        [installed / "r3train", "docs", "models"], tmp_path
    )
    assert "docs/guide/lora.md" in run([installed / "r3train", "explain", "--lora-rank"], tmp_path)
    run([installed / "r3train", "make-tiny-model", "--output", "runs/tiny"], tmp_path)
    (tmp_path / "rw.py").write_text("def words(prompt, text, ids):\n    return len(text) / 100\n")
    flags = ("--num-rollout", "2", "--run-dir", "run", "--custom-rm-path", "rw:words")
    output = run([installed / "r3train", "train", "--config", "tiny_cpu", *flags], tmp_path)
    assert "run finished" in output, output
    assert "next: r3train report run\n" in output and "\nr3train check-evidence run\n" in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    run([installed / "r3train", "check-evidence", "run"], tmp_path)

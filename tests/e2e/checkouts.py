"""Directories in which the commands of the pages can be run as a user would in a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import jobs
from tests.published import write_checkpoint

BIN = Path(sys.executable).parent
VENVS = (".venv", ".venv-trl")
LINKED = (
    "Makefile",
    "pyproject.toml",
    "requirements",
    "configs",
    "slurm",
    "benchmarks",
    "docs",
    "examples",
    "r3train",
    "train_async.py",
    *VENVS,
)
# what a fresh clone does not have
_NOT_COPIED = (".git", *VENVS, "runs", "build", "*.egg-info", "__pycache__", ".pytest_cache")


def linked(directory: Path) -> Path:
    """A directory whose files are the checkout's own; what is made in it stays in it."""
    for name in LINKED:
        if (jobs.ROOT / name).exists():
            (directory / name).symlink_to(jobs.ROOT / name)
    return directory


def copied(directory: Path) -> Path:
    """A copy of the checkout that may be written to, with its virtual environments."""
    shutil.copytree(jobs.ROOT, directory, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    for name in VENVS:
        if (jobs.ROOT / name).exists():
            (directory / name).symlink_to(jobs.ROOT / name)
    return directory


def add_qwen3_30b_a3b(directory: Path, tiny: Path) -> None:
    """Add the files that configs/qwen3_30b_a3b.toml names and a dry run reads.

    The tokenizer is that of the tiny checkpoint.
    """
    model = directory / "models" / "Qwen3-30B-A3B"
    write_checkpoint(model, model.name)
    for file in (tiny / "model").glob("tokenizer*"):
        shutil.copy(file, model)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    _update(model / "tokenizer_config.json", chat_template=template)
    asked = [{"role": "user", "content": "name fruits"}]
    train = [
        {
            "prompt": [*asked, {"role": "user", "content": str(n)}],
            "reward_model": {"ground_truth": "1"},
        }
        for n in range(64)
    ]
    test = {"problem": "1?", "answer": "1", "unique_id": "1", "subject": "s", "level": 1}
    files = []
    for option, rows in (("--train", train), ("--test", [test])):
        file = directory / f"{option[2:]}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files += [option, file]
    script = [sys.executable, jobs.ROOT / "examples/math/prepare.py"]
    subprocess.run([*script, *files, "--output", directory / "data"], check=True)


def _update(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def need_make() -> None:
    """Skip where these tests do not run in the environment that ``make`` has made and would use.

    It would make .venv anew, under the tests that run in it.
    """
    python = f"PYTHON=python{sys.version_info.major}.{sys.version_info.minor}"
    made = subprocess.run(
        ["make", python, "--question", "dev"],
        cwd=jobs.ROOT,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
    )
    if BIN != jobs.ROOT / ".venv" / "bin" or made.returncode != 0:
        pytest.skip(f"not run: {BIN.parent} is not what make dev has made")

"""Tiny models and whole training jobs of them, as the README starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from r3train.cuda_environment import visible_gpus
from r3train.engine.server import free_port
from r3train.verify.tiny import TinyOptions, build

ROOT = Path(__file__).resolve().parents[1]
# of a server, as recipes have it on the same machine
DTYPE = "bfloat16" if visible_gpus() else "float32"
R3 = ("--use-rollout-routing-replay", "--enable-r3-correctness-check")


@contextmanager
def tiny_model(options: TinyOptions = TinyOptions()) -> Iterator[Path]:
    """A directory that holds ``model`` and ``prompts.jsonl`` as long as the block runs."""
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory) / "tiny", options)
        yield Path(directory) / "tiny"


def describe(model: TinyOptions) -> str:
    """The shape of a model in the words of the pages."""
    return (
        f"{model.num_layers} layers x {model.hidden_size}, top {model.topk} of {model.num_experts}"
    )


def torchrun(ranks: int, *words: str) -> list[str]:
    """The command of so many ranks on this machine, which meet at a free port of it."""
    port = str(free_port("127.0.0.1"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-port", port]
    return [*launcher, "--nproc-per-node", str(ranks), *words]


def job_flags(tiny: Path, run_dir: Path, *flags: str) -> list[str]:
    """``train_async.py`` on the tiny model with the demo's recipe without R3, or that of flags; no plot, no TensorBoard."""
    demo = ["--config", "configs/tiny_cpu.toml", "--no-use-rollout-routing-replay"]
    demo.append("--no-enable-r3-correctness-check")
    return [
        "train_async.py",
        "--run-dir",
        str(run_dir),
        *([] if "--config" in flags else demo),
        "--hf-checkpoint",
        str(tiny / "model"),
        "--prompt-data",
        str(tiny / "prompts.jsonl"),
        "--no-plot",
        "--no-tensorboard",
        *flags,
    ]


def words(settings: Mapping[str, object]) -> list[str]:
    """{flag without dashes: value} as the words of a command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def environment(threads: int = 1) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def run(command: list[str], *, threads: int = 1) -> None:
    """Run a command to its end; RuntimeError with the end of its output where it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(threads), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"{command[:4]} ended with {done.returncode}:\n{done.stdout[-2000:]}"
            f"\n{done.stderr[-4000:]}"
        )


def step_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step that a job has written whole."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]

"""Whole training jobs for the tests: torchrun, the real server, the real actor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from r3train.engine.server import free_port
from r3train.observe.metric_table import row_of
from tests.e2e.rank_forks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
# At the demo's learning rate nine of 146 rows once shared no expert with the router's choice five steps later.
# Rows of older weights end no run, but every job would warn of them.
FEW_ROWS = ("--lr", "5e-4")
# canaries of every update are judged, whatever it costs
R3_FLAGS = "--use-rollout-routing-replay --enable-r3-correctness-check --r3-canary-share 1".split()
# for jobs whose server stands behind a proxy that counts or spoils every answer
NO_CANARIES = ("--r3-canaries", "0")
# of the run in conftest.py whose rollouts others train again: how it trains, and how many rollouts it has
RECORDED = 4
REWARD_WEIGHTS = 1.0, 0.25
RECORDED_FLAGS = (
    *R3_FLAGS,
    *f"--reuse-log-probs off --log-route-drift --num-rollout {RECORDED}".split(),
    *"--custom-rm-path tests.unit.reward_functions:even_and_small --reward-keys even small".split(),
    "--reward-weights",
    *map(str, REWARD_WEIGHTS),
    *"--advantage-estimator gdpo".split(),
)


@dataclass(frozen=True)
class Job:
    """A finished job: its exit code, what it printed, and its run directory."""

    code: int
    output: str
    run_dir: Path
    # by step, what its metrics port served then
    scraped: dict[int, dict[str, float]] = field(default_factory=dict)

    def metrics(self) -> list[dict]:
        """The job's metrics; each must be one that docs/reference/metrics.md names."""
        found = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in found]
        unnamed = {key for line in lines for key in line if row_of(key) is None}
        assert not unnamed - {"step", "time"}, f"not in r3train/observe/metrics.toml: {unnamed}"
        return lines

    def logs(self) -> str:
        """All ranks' log files, not the server's."""
        return "\n".join(p.read_text() for p in sorted((self.run_dir / "logs").glob("rank_*.log")))

    def evidence(self) -> list[dict]:
        files = sorted((self.run_dir / "evidence").glob("rank_*.jsonl"))
        return [json.loads(line) for f in files for line in f.read_text().splitlines()]


def command(
    run_dir: Path,
    *flags: str,
    ranks: int = 2,
    program: tuple[str, ...] = ("train_async.py",),
    recipe: str = "configs/tiny_cpu.toml",
) -> list[str]:
    """The command of torchrun, with the demo's recipe or another, without R3 unless the flags ask for it."""
    without_r3 = ("--no-use-rollout-routing-replay", "--no-enable-r3-correctness-check")
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--master-port",
        str(free_port("127.0.0.1")),
        "--nproc-per-node",
        str(ranks),
        *program,
        *(() if "--config" in flags else ("--config", recipe)),
        *(without_r3 if recipe == "configs/tiny_cpu.toml" and "--config" not in flags else ()),
        "--run-dir",
        str(run_dir),
        *flags,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(
    run_dir: Path,
    *flags: str,
    timeout: float = 480,
    env: Mapping[str, str] | None = None,
    torchrun: bool = False,
    **how: Any,
) -> Job:
    """Run a job to its end; env: further variables; ``how`` as for ``command``.

    torchrun: starts the ranks, which otherwise are forks of a process that has imported what they need.
    """
    words, variables = command(run_dir, *flags, **how), environment() | dict(env or {})
    if not torchrun:
        at = words.index("--nproc-per-node") + 1
        code, output = run_ranks(words[at + 1 :], int(words[at]), variables, timeout)
        return Job(code, output, run_dir)
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Job(done.returncode, done.stdout, run_dir)


def start(command: list[str], output: Path, **options: bool) -> psutil.Popen:
    """A job that goes on next to the test; what it prints goes to a file."""
    with output.open("w") as out:
        return psutil.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            **options,
        )


# metrics of the engine's own log-probs
# and what a server found in its cache, which follows its batches
OF_THE_GAP = (
    "log_prob_gap",
    "train/ess",
    "train/chi2",
    "train/ppl_rollout",
    "train/ppl_ratio",
    "train/loss_tokens_rows_",
)


def same_numbers(one: list[dict], other: list[dict], *, but: tuple[str, ...] = ()) -> None:
    """Losses, gradient norms, rewards, R3 counts: every number that is not a time."""
    assert [m["step"] for m in one] == [m["step"] for m in other]
    for a, b in zip(one, other, strict=True):
        names = [n for n in a if n.startswith(("train/", "r3/", "rollout/reward")) and n in b]
        names = [n for n in names if not any(part in n for part in but)]
        assert len(names) > 20
        assert {n: a[n] for n in names} == {n: b[n] for n in names}

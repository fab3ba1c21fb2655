"""Growth of whole jobs with ranks, and of what reads a finished run with its steps.

    python -m benchmarks.job_growth [--rounds 2] [--steps 12]

The demo at 1, 2, 4 and 8 ranks, which share one server and this machine's cores; one rank takes a second
turn in each round, which shows what two equal jobs differ by.  Then runs of 1, 2 and 4 times
``--run-steps`` steps: CPU time and memory of ``check-evidence`` and ``report``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.against_trl import ASYNC, SHAPES, WARM_UP, run_job
from benchmarks.measure import flags, ratios, spread, spreads, write_result
from benchmarks.tiny_jobs import ROOT, environment, tiny_model
from r3train.engine.server import SGLangServer

RANKS = {"1": 1, "2": 2, "4": 4, "8": 8, "1, again": 1}
PARTS = ("perf/step_s", "perf/train_s", "perf/rollout_wait_s", "perf/publish_s")
# runs a command, and says what it took of the CPU and at most of memory
_MEASURED = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
took = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, took.ru_utime + took.ru_stime, took.ru_maxrss / 1024]))
"""


def main() -> None:
    arguments = flags(__doc__, rounds=2, steps=12, run_steps=60)
    with tiny_model() as tiny:
        with SGLangServer(
            tiny / "model", tiny / "sglang.log", return_routed_experts=True
        ) as server:
            ranks = of_ranks(tiny, server.addr, arguments.rounds, arguments.steps)
            readers = of_steps(tiny, server.addr, arguments.run_steps)
    write_result(arguments.output, {"ranks": ranks, "readers": readers})


def of_ranks(tiny: Path, addr: str, rounds: int, steps: int) -> dict[str, Any]:
    """Mean seconds of the parts of a step, round by round, and each step's ratio to one rank's."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in RANKS}
    for number in range(rounds):
        for name, ranks in RANKS.items():
            run_dir = tiny / f"run-{number}-{name.replace(', ', '-')}"
            measured = run_job(tiny, run_dir, addr, SHAPES["demo"], steps, ASYNC, ranks=ranks)
            parts[name].append({part: mean(step[part] for step in measured) for part in PARTS})
    step_s = {name: [of_round["perf/step_s"] for of_round in each] for name, each in parts.items()}
    return {
        "steps": steps - WARM_UP,
        "parts_s": {
            name: spreads({part: [of_round[part] for of_round in each] for part in PARTS})
            for name, each in parts.items()
        },
        "over_one": {name: ratios(each, step_s["1"]) for name, each in step_s.items()},
    }


def of_steps(tiny: Path, addr: str, run_steps: int) -> list[dict[str, Any]]:
    """For runs of more and more steps: bytes of evidence, and what its readers took of CPU and memory."""
    found = []
    for steps in (run_steps, 2 * run_steps, 4 * run_steps):
        run_dir = tiny / f"steps-{steps}"
        run_job(tiny, run_dir, addr, SHAPES["demo"], steps - 1, ASYNC, ranks=2)
        evidence = sum(f.stat().st_size for f in (run_dir / "evidence").iterdir())
        readers = {name: reader(name, run_dir) for name in ("check-evidence", "report")}
        found.append({"steps": steps, "evidence_mb": evidence / 1e6, "readers": readers})
    return found


def reader(command: str, run_dir: Path) -> dict[str, float]:
    """CPU seconds and the most MB of ``r3train COMMAND RUN_DIR``; RuntimeError where it fails."""
    r3train = [sys.executable, "-m", "r3train.cli", command, str(run_dir)]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *r3train],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    code, seconds, megabytes = json.loads(done.stdout)
    if code:
        raise RuntimeError(f"r3train {command} ended with {code}")
    return {"cpu_s": seconds, "mb": megabytes}


if __name__ == "__main__":
    main()

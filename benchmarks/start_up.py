"""Seconds of each phase of a real job's start, from the command to the first trained step.

    python -m benchmarks.start_up [--rounds 3]

The demo's command with R3 and its check runs as anybody would run it; its own lines are timed as
they appear.  The server starts before rank 0 imports torch, so the phases do not add up by accident:
each is the time until the next line.  Each round also starts a server alone, before the job and after it: the
floor of a job's start, and the noise.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from benchmarks.measure import flags, ratios, spread, write_result
from benchmarks.tiny_jobs import (
    R3,
    ROOT,
    environment,
    job_flags,
    step_metrics,
    tiny_model,
    torchrun,
)
from r3train.engine.server import SGLangServer

# the line that ends a phase, and the phase's name
PHASES = (
    ("joining the ranks ...", "interpreter, torchrun, checks of the configuration"),
    ("done: joining the ranks", "imports of torch and megatron-core, process group"),
    ("building the Megatron actor ...", "parts of rank 0 built"),
    ("done: building the Megatron actor", "actor built, checkpoint read"),
    ("done: starting SGLang", "rest of the server's start"),
    ("step", "first rollout and step"),
)
STEP_KEYS = ("perf/rollout_wait_s", "perf/train_s", "perf/publish_s")


def main() -> None:
    arguments = flags(__doc__, rounds=3, ranks=2)
    with tiny_model() as tiny:
        run_dirs = [tiny / f"run{i}" for i in range(arguments.rounds)]
        alone, again, phases = [], [], []
        for run_dir in run_dirs:
            alone.append(time_server(tiny))
            phases.append(time_phases(tiny, run_dir, arguments.ranks))
            again.append(time_server(tiny))
        steps = [step_metrics(run_dir) for run_dir in run_dirs]
    totals = [sum(run.values()) for run in phases]
    result = {
        "ranks": arguments.ranks,
        "server_alone_s": spread(alone),
        "over_server_alone": ratios(totals, alone),
        "server_alone_again": ratios(again, alone),
        "phases_s": {name: spread([run[name] for run in phases]) for _, name in PHASES},
        "total_s": spread(totals),
        "first_step": {key: spread([first[key] for first, *_ in steps]) for key in STEP_KEYS},
        "later_steps": {  # the last step does not publish
            key: spread([min(step[key] for step in later) for _, *later, _ in steps])
            for key in STEP_KEYS
        },
    }
    write_result(arguments.output, result)


def time_server(tiny: Path) -> float:
    """Seconds from a server's start until it answers."""
    began = time.perf_counter()
    with SGLangServer(tiny / "model", tiny / "sglang.log", return_routed_experts=True):
        return time.perf_counter() - began


def time_phases(tiny: Path, run_dir: Path, ranks: int) -> dict[str, float]:
    """Seconds of each phase of one job of four steps."""
    parallel = ("--expert-model-parallel-size", str(ranks))
    flags_of_job = job_flags(tiny, run_dir, "--num-rollout", "4", *R3, *parallel)
    seconds: dict[str, float] = {}
    lines: list[str] = []
    waiting = list(PHASES)
    last = time.perf_counter()
    job = subprocess.Popen(
        torchrun(ranks, *flags_of_job),
        cwd=ROOT,
        env=environment() | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in job.stdout:
        now = time.perf_counter()
        lines.append(line)
        if waiting and line.startswith(waiting[0][0]):
            seconds[waiting.pop(0)[1]], last = now - last, now
    if job.wait() or waiting:
        raise RuntimeError(f"the job ended with {job.returncode}:\n{''.join(lines[-30:])}")
    return seconds


if __name__ == "__main__":
    main()

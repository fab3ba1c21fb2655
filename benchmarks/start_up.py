"""Where the start of a real job goes, from the command to the first trained step.

    python -m benchmarks.start_up [--rounds 3]

The demo's command with R3 and its check runs as anybody would run it; what is timed is when its own
lines appear.  The server starts while the actor is built, so the phases do not add up by accident:
each is the time until the next line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import spread, write_result
from r3train.tiny import TinyOptions, build

ROOT = Path(__file__).resolve().parents[1]
# the line that ends a phase, and what went on until it came
PHASES = (
    ("joining the ranks ...", "interpreter, torchrun, checks of the configuration"),
    ("done: joining the ranks", "imports of torch and megatron-core, process group"),
    ("building the Megatron actor ...", "server process started"),
    ("done: building the Megatron actor", "actor built, checkpoint read"),
    ("done: starting SGLang", "rest of the server's start"),
)
FIRST_STEP = "first rollout and step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch) / "tiny", TinyOptions())
        runs = [one_start(Path(scratch), i, arguments.ranks) for i in range(arguments.rounds)]
    names = [name for _, name in PHASES] + [FIRST_STEP]
    result = {
        "ranks": arguments.ranks,
        "phases_s": {name: spread([run[name] for run in runs]) for name in names},
        "total_s": spread([sum(run[name] for name in names) for run in runs]),
        "first_step": {key: spread([run[key] for run in runs]) for key in STEP_KEYS},
        "later_steps": {key: spread([run[f"later {key}"] for run in runs]) for key in STEP_KEYS},
    }
    write_result(arguments.output, result)


STEP_KEYS = ("perf/rollout_wait_s", "perf/train_s", "perf/publish_s")


def one_start(scratch: Path, number: int, ranks: int) -> dict[str, Any]:
    """Seconds of each phase of one job of four steps, and of its first and later steps' parts."""
    run_dir = scratch / f"run{number}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "train_async.py", "--config"]
    command += ["configs/tiny_cpu.toml", "--run-dir", str(run_dir), "--num-rollout", "4"]
    command += ["--use-rollout-routing-replay", "--enable-r3-correctness-check"]
    command += ["--expert-model-parallel-size", str(ranks), "--no-plot", "--no-tensorboard"]
    command += ["--hf-checkpoint", str(scratch / "tiny" / "model")]
    command += ["--prompt-data", str(scratch / "tiny" / "prompts.jsonl")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    seconds, lines, waiting = {}, [], list(PHASES)
    last = time.perf_counter()
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
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
        elif not waiting and FIRST_STEP not in seconds and line.startswith("step"):
            seconds[FIRST_STEP] = now - last
    if job.wait() or waiting or FIRST_STEP not in seconds:
        raise RuntimeError(f"the job ended with {job.returncode}:\n{''.join(lines[-30:])}")
    steps = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for key in STEP_KEYS:
        seconds[key] = steps[0][key]
        # the last step does not publish
        seconds[f"later {key}"] = sorted(step[key] for step in steps[1:-1])[0]
    return seconds


if __name__ == "__main__":
    main()

"""End to end against TRL's GRPO trainer: samples a second on the same tiny task.

    make bench-venv && python -m benchmarks.against_trl [--rounds 3]

The same checkpoint, prompts, prompts a step, group size, response length (the end token is ignored
on both sides), one optimizer step a rollout, float32, Adam.  Each round runs every arm once, one
after the other; the first steps of a run warm up and are left out.  Our jobs share one server,
so that start-up is not most of the time; R3 and its check are on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import ratios, spread, write_result
from r3train.engine.server import SGLangServer
from r3train.tiny import TinyOptions, build

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
WARM_UP = 2


@dataclass(frozen=True)
class Shape:
    """One task size."""

    name: str
    model: TinyOptions
    response: int
    steps: int
    prompts: int = 16
    group: int = 8

    @property
    def samples(self) -> int:
        return self.prompts * self.group


SHAPES = (
    Shape("demo", TinyOptions(), response=8, steps=14),
    Shape(
        "longer",
        TinyOptions(
            num_layers=4,
            hidden_size=256,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            num_experts=16,
            topk=4,
            moe_intermediate_size=256,
        ),
        response=32,
        steps=5,
    ),
)
R3 = ["--use-rollout-routing-replay", "--enable-r3-correctness-check"]
ASYNC = [*R3, "--max-weight-staleness", "1", "--pause-generation-mode", "in_place"]
# name -> ranks of the actor and flags
OURS = {
    "r3train, asynchronous": (1, ASYNC),
    "r3train, synchronous": (1, [*R3, "--max-weight-staleness", "0"]),
    "r3train, asynchronous, 2 ranks": (2, ASYNC),
}
# where a step of ours goes; the log-prob pass is part of train
STEP_PARTS = ("perf/step_s", "perf/rollout_wait_s", "perf/train_s", "perf/publish_s")
TRL = {"TRL, 1 thread": 1, "TRL, 2 threads": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=[s.name for s in SHAPES], action="append")
    parser.add_argument("--steps", type=int, help="instead of the shape's own")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit(f"{TRL_PYTHON.relative_to(ROOT)} is missing: make bench-venv")
    shapes = [s for s in SHAPES if s.name in (arguments.shape or [s.name for s in SHAPES])]
    if arguments.steps:
        shapes = [replace(s, steps=arguments.steps) for s in shapes]
    result: dict[str, Any] = {"warm_up": WARM_UP, "shapes": {}}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as scratch:
            result["shapes"][shape.name] = measure(shape, Path(scratch), arguments.rounds, result)
    write_result(arguments.output, result)


def measure(shape: Shape, scratch: Path, rounds: int, result: dict[str, Any]) -> dict[str, Any]:
    """Samples a second of every arm by round, and each arm's ratio to the best of TRL's."""
    build(scratch / "tiny", shape.model)
    rates: dict[str, list[float]] = {name: [] for name in (*OURS, *TRL)}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in OURS}
    generating: dict[str, list[float]] = {name: [] for name in TRL}
    server = SGLangServer(
        scratch / "tiny" / "model",
        scratch / "sglang.log",
        return_routed_experts=True,
    )
    with server:
        for number in range(rounds):
            for i, (name, (ranks, flags)) in enumerate(OURS.items()):
                given = [*flags, "--rollout-external-engine-addrs", server.addr]
                steps = ours(shape, scratch, scratch / f"run-{number}-{i}", ranks, given)
                mean = {k: sum(step[k] for step in steps) / len(steps) for k in STEP_PARTS}
                parts[name].append(mean)
                rates[name].append(shape.samples / mean["perf/step_s"])
                note(shape, name, rates)
            for name, threads in TRL.items():
                step_s, generate_s, result["trl"] = trl(shape, scratch, threads)
                generating[name].append(generate_s / step_s)
                rates[name].append(shape.samples / step_s)
                note(shape, name, rates)
    best = [max(pair) for pair in zip(*(rates[name] for name in TRL))]
    m = shape.model
    return {
        "model": f"{m.num_layers} layers x {m.hidden_size}, top {m.topk} of {m.num_experts}",
        "prompts": shape.prompts,
        "group": shape.group,
        "response": shape.response,
        "steps": shape.steps - WARM_UP,
        "samples_per_s": {name: spread(values) for name, values in rates.items()},
        "step_parts_s": {
            name: {k: spread([mean[k] for mean in means]) for k in STEP_PARTS}
            for name, means in parts.items()
        },
        "trl_generate_share": {name: spread(values) for name, values in generating.items()},
        "over_best_trl": {name: ratios(values, best) for name, values in rates.items()},
    }


def note(shape: Shape, name: str, rates: dict[str, list[float]]) -> None:
    print(f"{shape.name}: {name}: {rates[name][-1]:.1f} samples/s", file=sys.stderr, flush=True)


def ours(
    shape: Shape, scratch: Path, run_dir: Path, ranks: int, flags: list[str]
) -> list[dict[str, Any]]:
    """Metrics of the steps after the warm-up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "train_async.py", "--config"]
    command += ["configs/tiny_cpu.toml", "--run-dir", str(run_dir)]
    command += ["--expert-model-parallel-size", str(ranks)]
    command += ["--hf-checkpoint", str(scratch / "tiny" / "model")]
    command += ["--prompt-data", str(scratch / "tiny" / "prompts.jsonl")]
    command += ["--rollout-batch-size", str(shape.prompts)]
    command += ["--n-samples-per-prompt", str(shape.group)]
    command += ["--rollout-max-response-len", str(shape.response), "--rollout-ignore-eos"]
    command += ["--num-rollout", str(shape.steps + 1), "--max-tokens-per-gpu", "16384"]
    command += ["--lr", "1e-5", "--lr-warmup-iters", "0", "--rollout-max-concurrency", "128"]
    command += ["--no-plot", "--no-tensorboard", *flags]
    run(command, threads=1)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    # the last step does not publish
    return [json.loads(line) for line in lines][WARM_UP:-1]


def trl(shape: Shape, scratch: Path, threads: int) -> tuple[float, float, str]:
    """Mean seconds of a step and of its generation after the warm-up, and TRL's version."""
    output = scratch / "trl.json"
    command = [str(TRL_PYTHON), "benchmarks/trl_worker.py", "--output", str(output)]
    command += ["--model", str(scratch / "tiny" / "model"), "--threads", str(threads)]
    command += ["--prompts", str(scratch / "tiny" / "prompts.jsonl"), "--lr", "1e-5"]
    command += ["--prompts-a-step", str(shape.prompts), "--group", str(shape.group)]
    command += ["--response", str(shape.response), "--steps", str(shape.steps)]
    run(command, threads=threads)
    found = json.loads(output.read_text())
    if found["mean_length"] != shape.response:
        raise RuntimeError(
            f"TRL's responses have {found['mean_length']} tokens on average,"
            f" expected {shape.response}"
        )
    ends = found["step_ends"][WARM_UP - 1 :]
    generate_s = found["generate_s"][WARM_UP:]
    if len(generate_s) != len(ends) - 1:
        raise RuntimeError(f"TRL generated {len(found['generate_s'])} times in {shape.steps} steps")
    return (
        (ends[-1] - ends[0]) / (len(ends) - 1),
        sum(generate_s) / len(generate_s),
        found["trl"],
    )


def run(command: list[str], *, threads: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{command[:4]} ended with {done.returncode}:\n{done.stdout[-2000:]}"
            f"\n{done.stderr[-4000:]}"
        )


if __name__ == "__main__":
    main()

"""End to end against TRL's GRPO trainer: samples per second on the same tiny task.

    make bench-venv && python -m benchmarks.against_trl [--rounds 3]

The same checkpoint, prompts, prompts per step, group size, response length (the end token is ignored
on both sides), one optimizer step per rollout, float32, Adam.  Each round runs our job twice, which
shows the noise, and TRL's once, one after the other; the first steps of a run warm up and are left
out.  Our jobs share one server, so that start-up is not most of the time; R3 and its check are on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.measure import flags, ratios, spread, spreads, write_result
from benchmarks.tiny_jobs import (
    R3,
    ROOT,
    describe,
    job_flags,
    run,
    step_metrics,
    tiny_model,
    torchrun,
    words,
)
from r3train.engine.server import SGLangServer
from r3train.verify.tiny import TinyOptions

TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
# the first step, and those that wait for the scores of the first two updates, which every start judges
WARM_UP = 3


@dataclass(frozen=True)
class Shape:
    """One size of the task: a step takes ``prompts`` prompts, and ``group`` responses to each."""

    model: TinyOptions
    response: int
    steps: int
    prompts: int = 16
    group: int = 8
    prompt_words: int = 0  # 0: the task's own prompts, of about ten words

    @property
    def samples(self) -> int:
        return self.prompts * self.group


LONGER = TinyOptions(
    num_layers=4,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    num_experts=16,
    topk=4,
    moe_intermediate_size=256,
    max_position_embeddings=1024,
)
SHAPES = {
    "demo": Shape(TinyOptions(), response=8, steps=15),
    "longer": Shape(LONGER, response=32, steps=7),
    "long": Shape(LONGER, response=256, steps=5, prompts=2, prompt_words=150),
}
ASYNC = (
    *"--max-weight-staleness 1 --pause-generation-mode in_place".split(),
    "--update-weight-transfer-mode",
    "shared_memory",
)
OURS, AGAIN, TRL = "r3train", "r3train, again", "TRL"
# of our only rank, beside a server of one: a second one would share its core, and libgomp's threads wait busily
THREADS, TRL_THREADS = 1, 2
# of a step of ours; the log-prob pass is part of train
STEP_PARTS = ("perf/step_s", "perf/rollout_wait_s", "perf/train_s", "perf/publish_s")


def main() -> None:
    arguments = flags(__doc__, rounds=3, steps=0, shape="")  # 0 and "": each shape's own, all
    if not TRL_PYTHON.exists():
        raise SystemExit(f"{TRL_PYTHON.relative_to(ROOT)} is missing: make bench-venv")
    result: dict[str, Any] = {"warm_up": WARM_UP, "shapes": {}}
    for name in [arguments.shape] if arguments.shape else SHAPES:
        shape = SHAPES[name]
        steps = arguments.steps or shape.steps
        with tiny_model(shape.model) as tiny:
            if shape.prompt_words:
                lengthen(tiny / "prompts.jsonl", shape.prompt_words)
            result["shapes"][name], result["trl"] = measure(shape, steps, tiny, arguments.rounds)
    write_result(arguments.output, result)


def measure(shape: Shape, steps: int, tiny: Path, rounds: int) -> tuple[dict[str, Any], str]:
    """Samples a second of every arm by round, its ratio to TRL's, and TRL's version."""
    rates: dict[str, list[float]] = {name: [] for name in (OURS, AGAIN, TRL)}
    parts: list[dict[str, float]] = []
    generating: list[float] = []

    def note(name: str, step_s: float) -> None:
        rates[name].append(shape.samples / step_s)
        print(f"{name}: {rates[name][-1]:.1f} samples/s", file=sys.stderr, flush=True)

    with SGLangServer(tiny / "model", tiny / "sglang.log", return_routed_experts=True) as server:
        for number in range(rounds):
            for i, name in enumerate((OURS, AGAIN)):
                run_dir = tiny / f"run-{number}-{i}"
                measured = run_job(tiny, run_dir, server.addr, shape, steps, ASYNC, threads=THREADS)
                parts.append({k: mean(step[k] for step in measured) for k in STEP_PARTS})
                note(name, parts[-1]["perf/step_s"])
            step_s, generate_s, version = run_trl(shape, steps, tiny, TRL_THREADS)
            generating.append(generate_s / step_s)
            note(TRL, step_s)
    found = {
        "model": describe(shape.model),
        "prompts": shape.prompts,
        "group": shape.group,
        "prompt_words": shape.prompt_words,
        "response": shape.response,
        "threads": THREADS,
        "steps": steps - WARM_UP,
        "samples_per_s": spreads(rates),
        "step_parts_s": spreads({part: [of_job[part] for of_job in parts] for part in STEP_PARTS}),
        "trl_generate_share": spread(generating),
        "over_trl": {name: ratios(rates[name], rates[TRL]) for name in (OURS, AGAIN)},
        "again_over_ours": ratios(rates[AGAIN], rates[OURS]),
    }
    return found, version


def lengthen(prompts: Path, words: int) -> None:
    """Repeat every prompt's text until it has so many words."""
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        own = line["input"].split()
        line["input"] = " ".join((own * words)[:words])
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def run_job(
    tiny: Path,
    run_dir: Path,
    addr: str,
    shape: Shape,
    steps: int,
    given: Sequence[str],
    *,
    ranks: int = 1,
    threads: int = 1,
) -> list[dict[str, Any]]:
    """Run a job of ours against a server; the metrics of its steps behind the warm-up."""
    settings = {
        "rollout-external-engine-addrs": addr,
        "expert-model-parallel-size": ranks,
        "rollout-batch-size": shape.prompts,
        "n-samples-per-prompt": shape.group,
        "rollout-max-response-len": shape.response,
        "num-rollout": steps + 1,
        "max-tokens-per-gpu": 16384,
        "lr": 1e-5,
        "lr-warmup-iters": 0,
        "rollout-max-concurrency": shape.samples,
    }
    flags = job_flags(tiny, run_dir, *R3, "--rollout-ignore-eos", *words(settings), *given)
    run(torchrun(ranks, *flags), threads=threads)
    return step_metrics(run_dir)[WARM_UP:-1]  # the last step does not publish


def run_trl(shape: Shape, steps: int, tiny: Path, threads: int) -> tuple[float, float, str]:
    """Mean seconds of a step and of its generation after the warm-up, and TRL's version."""
    output = tiny / "trl.json"
    settings = {
        "output": output,
        "model": tiny / "model",
        "prompts": tiny / "prompts.jsonl",
        "threads": threads,
        "lr": 1e-5,
        "prompts-a-step": shape.prompts,
        "group": shape.group,
        "response": shape.response,
        "steps": steps,
    }
    os.environ["HF_HUB_OFFLINE"] = "1"
    run([str(TRL_PYTHON), "benchmarks/trl_worker.py", *words(settings)], threads=threads)
    found = json.loads(output.read_text(encoding="utf-8"))
    if found["mean_length"] != shape.response:
        raise RuntimeError(
            f"TRL's responses have {found['mean_length']} tokens on average,"
            f" expected {shape.response}"
        )
    ends, generate_s = found["step_ends"][WARM_UP - 1 :], found["generate_s"][WARM_UP:]
    if len(generate_s) != len(ends) - 1:
        raise RuntimeError(f"TRL generated {len(found['generate_s'])} times in {steps} steps")
    return (ends[-1] - ends[0]) / (len(ends) - 1), mean(generate_s), found["trl"]


if __name__ == "__main__":
    main()

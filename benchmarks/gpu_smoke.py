"""A first day on GPUs: every command in its order, each of which needs the ones before it.

    python -m benchmarks.gpu_smoke [--write-docs] [--only NAME ...] [--recipe RECIPE] [--list]

What make gpu-smoke runs.  Jobs that are independent run at once, each on GPUs of its own.  It ends at the first
failure; exit code 0 where all passed, 1 where one failed, 3 where one was not run for want of GPUs.  Output lies in
runs/gpu, and --write-docs puts a table of it into docs/run/gpu_results.md.  --recipe adds a real recipe, whose model
and prompts are here: rollouts alone, then their training alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

from benchmarks.measure import run_logged

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/run/gpu_results.md"
BEGIN, END = "<!-- gpu-smoke: begin -->", "<!-- gpu-smoke: end -->"
NOT_RUN = 3
_TIMEOUT_S = 1800
# of shapes that kernels are made for: those of the demo fail, or pass, for reasons of their own.  A toy needs few
# CUDA graphs, and captures of many sizes take longer than its job
_TOY = "--config configs/tiny_gpu.toml --sglang-cuda-graph-max-bs-decode 16"
# long enough that servers and ranks differ by what real answers differ by
_LONG = "--prompt-data runs/tiny_gpu/long.jsonl --rollout-max-response-len 1000"
_LONG += " --sglang-max-total-tokens 262144"
_PROVED = "--num-rollout 3 --ci-test --check-weight-update-equal --run-dir"
_TURNS = "--colocate --max-weight-staleness 0 --update-weight-transfer-mode shared_memory"
_FIRST_PORT = 29500


@dataclass(frozen=True)
class Step:
    """One command, the GPUs that it needs, and what it proves.

    is_independent: it may run next to its neighbours, on GPUs of its own.  minutes: on paper.
    """

    name: str
    command: str
    proves: str
    num_gpus: int = 1
    minutes: int = 1
    is_independent: bool = field(default=False, kw_only=True)


def _job(
    number: int,
    name: str,
    flags: str,
    proves: str,
    num_gpus: int = 1,
    num_ranks: int = 1,
    *,
    is_independent: bool = True,
) -> Step:
    """A short R3 job of the toy in ``runs/gpu/NAME``, in which every step is proved; number: of its port."""
    port = _FIRST_PORT + number
    launch = f"torchrun --nproc-per-node {num_ranks} --master-port {port} train_async.py {_TOY}"
    command = " ".join(filter(None, (launch, flags, _PROVED)))
    minutes = 3 if not is_independent else 2
    return Step(
        name,
        f"{command} runs/gpu/{name}",
        proves,
        num_gpus,
        minutes,
        is_independent=is_independent,
    )


def _toy_of(number: int, name: str, family: str, proves: str) -> Step:
    model = f"--hf-checkpoint runs/tiny_gpu/{family}/model"
    return _job(number, name, f"{_TURNS} {model}", proves)


# kernels before jobs, jobs before what they are variants of, figures on a quiet machine, and topologies last, whose
# bounds no device has met
STEPS = (
    Step(
        "model",
        "r3train make-tiny-model --size gpu --output runs/tiny_gpu --force",
        "the package is installed",
    ),
    Step(
        "toys",
        "python -m benchmarks.gpu_toys runs/tiny_gpu",
        "prompts of 200 tokens, and toys of latent attention, delta nets and sinks",
    ),
    Step(
        "doctor",
        "r3train doctor",
        "versions go together, Transformer Engine imports, one cuDNN is loaded; GPUs, shared memory",
    ),
    Step(
        "kernels",
        "python -m benchmarks.gpu_kernels --output runs/gpu/kernels.json",
        "attention at every recipe's shapes, grouped linears, FusedAdam, permutation and linear attention, each alone"
        " against float32",
        minutes=3,
    ),
    Step(
        "nccl",
        "python -m pytest tests/gpu/test_nccl.py -s",
        "GPUs reach one another; the log has the bandwidth, without NVLS as in a run and with it",
        2,
    ),
    Step(
        "replay",
        "python -m pytest tests/gpu/test_routing_on_gpu.py",
        "replay, filling and fingerprints on the device, without waiting for it",
    ),
    _job(
        0,
        "job",
        _LONG,
        "weights reach the server bit for bit, and every step is proved, with answers of 1,000 tokens",
        2,
        is_independent=False,
    ),
    Step(
        "evidence",
        "r3train check-evidence runs/gpu/job",
        "the evidence of that job holds, read alone",
        2,
    ),
    _job(
        1,
        "colocated",
        f"{_TURNS} {_LONG}",
        "server and rank colocated on one GPU, every step proved, with answers of 1,000 tokens",
        is_independent=False,
    ),
    Step(
        "colocated_evidence",
        "r3train check-evidence runs/gpu/colocated",
        "the evidence of that job holds, read alone",
    ),
    _toy_of(3, "latent", "moonlight", "latent attention, trained and served"),
    _toy_of(4, "delta_nets", "qwen3_5_moe", "gated delta nets, trained and served"),
    _toy_of(5, "sinks", "gpt_oss", "sinks and windows, trained and served"),
    _job(
        6, "adapters", f"{_TURNS} --lora-rank 8", "adapters on Transformer Engine's layers, merged"
    ),
    _job(
        7,
        "optimizer",
        f"{_TURNS} --optimizer-override use_precision_aware_optimizer=true"
        " --optimizer-override exp_avg_dtype=bf16 --optimizer-override exp_avg_sq_dtype=bf16",
        "Transformer Engine's FusedAdam with moments in bfloat16, which move to the host and back",
    ),
    _job(
        2,
        "two_servers",
        f"{_TURNS} --rollout-num-engines 2",
        "two servers agree with one another and with the actor",
        2,
        num_ranks=2,
    ),
    _job(
        8,
        "tp2",
        f"{_TURNS} --tensor-model-parallel-size 2 --sequence-parallel",
        "a job over two tensor ranks",
        2,
        num_ranks=2,
    ),
    _job(
        9,
        "cp2",
        f"{_TURNS} --context-parallel-size 2",
        "a job over two context-parallel ranks",
        2,
        num_ranks=2,
    ),
    Step(
        "replay_overhead",
        "python -m benchmarks.replay_overhead --rounds 15 --output runs/gpu/replay_overhead.json",
        "what replay and its check cost of a step, in bfloat16",
        minutes=2,
    ),
    Step(
        "weight_sync",
        "python -m benchmarks.weight_sync --output runs/gpu/weight_sync.json",
        "what an update costs, in bfloat16",
        2,
        minutes=3,
    ),
    Step(
        "rollout_rate",
        "python -m benchmarks.rollout_rate --output runs/gpu/rollout_rate.json",
        "tokens per second with routed experts and without",
        minutes=3,
    ),
    Step(
        "topologies",
        "r3train verify --bf16",
        "R3 over all topologies that the GPUs hold (with one GPU those of one rank), against two oracles:"
        " in float32, and in bfloat16 within 5% forward and 30% in gradients; context parallelism in bfloat16 alone",
        minutes=10,
    ),
)


def recipe_steps(recipe: str, num_gpus: int) -> tuple[Step, ...]:
    """A recipe's rollouts without an actor, and their training without a server."""
    dumped = "runs/gpu/recipe_rollouts"
    launch = f"r3train train --config {shlex.quote(recipe)} --num-rollout 2 --run-dir"
    return (
        Step(
            "recipe_rollouts",
            f"{launch} {dumped} --debug-rollout-only",
            "the recipe's servers start and generate at its sizes",
            num_gpus,
            15,
        ),
        Step(
            "recipe_training",
            f"{launch} runs/gpu/recipe_training --replay-rollouts {dumped}/rollouts",
            "its ranks hold its memory and train those rollouts, every step proved",
            num_gpus,
            15,
        ),
    )


@dataclass(frozen=True)
class Outcome:
    step: Step
    word: str  # passed, failed, not run
    seconds: float
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--write-docs", action="store_true", help="write docs/run/gpu_results.md")
    parser.add_argument("--recipe", help="a real recipe to try behind the toys, alone in its parts")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    given = parser.parse_args(arguments)
    devices = [] if given.list else gpu_names()
    steps = [step for step in STEPS if given.only is None or step.name in given.only]
    if given.recipe is not None:
        steps += recipe_steps(given.recipe, len(devices))
    if given.list:
        for step in steps:
            print(f"{step.name:>18}  {step.command}")
        return 0
    found = outcomes(steps, len(devices), ROOT / "runs" / "gpu")
    if given.write_docs and devices:
        write_page(PAGE, found, devices)
    words = {outcome.word for outcome in found}
    return 1 if "failed" in words else NOT_RUN if "not run" in words else 0


def gpu_names() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(i) for i in range(count)]


def outcomes(steps: Sequence[Step], num_gpus: int, logs: Path) -> list[Outcome]:
    """Run the steps in order, independent neighbours at once, and none behind a failure; print a line for each."""
    found: list[Outcome] = []
    for wave in _waves(steps):
        failed = [outcome.step.name for outcome in found if outcome.word == "failed"]
        if len(wave) == 1 or not num_gpus or failed:
            found += [_told(step, num_gpus, failed, logs) for step in wave]
        else:
            found += _at_once(wave, num_gpus, logs)
    return found


def _waves(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield each step alone, but independent neighbours of a number of GPUs together."""
    for (is_independent, _), group in groupby(steps, lambda s: (s.is_independent, s.num_gpus)):
        if is_independent:
            yield list(group)
        else:
            yield from ([step] for step in group)


def _at_once(wave: Sequence[Step], num_gpus: int, logs: Path) -> list[Outcome]:
    """Run steps of one number of GPUs, as many at a time as the machine has GPUs for."""
    each = wave[0].num_gpus
    every = ",".join(map(str, range(num_gpus)))
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")
    free: SimpleQueue[str] = SimpleQueue()
    for first in range(0, num_gpus - each + 1, each):
        free.put(",".join(visible[first : first + each]))

    def run(step: Step) -> Outcome:
        gpus = free.get() if num_gpus >= each else None
        try:
            return _told(step, num_gpus, (), logs, gpus)
        finally:
            if gpus is not None:
                free.put(gpus)

    with ThreadPoolExecutor(max(1, num_gpus // each)) as pool:
        return list(pool.map(run, wave))


def _told(
    step: Step, num_gpus: int, failed: Sequence[str], logs: Path, gpus: str | None = None
) -> Outcome:
    outcome = _outcome(step, num_gpus, failed, logs, gpus)
    took = f" in {outcome.seconds:.0f} s" if outcome.word != "not run" else ""
    reason = outcome.reason and f": {outcome.reason}"
    print(f"{step.name:>18}  {outcome.word}{took}{reason}", flush=True)
    return outcome


def _outcome(
    step: Step, num_gpus: int, failed: Sequence[str], logs: Path, gpus: str | None
) -> Outcome:
    """Run a step; failed: names of steps before it; gpus: those that it sees, None for all."""
    if not num_gpus:
        return Outcome(step, "not run", 0.0, "no CUDA device")
    if num_gpus < step.num_gpus:
        return Outcome(step, "not run", 0.0, f"needs {step.num_gpus} GPUs, {num_gpus} here")
    if failed:
        return Outcome(step, "not run", 0.0, f"{failed[0]} failed")
    logs.mkdir(parents=True, exist_ok=True)
    log, began = logs / f"{step.name}.log", time.monotonic()
    bin_dir = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    words = shlex.split(step.command)
    if "--run-dir" in words:  # a directory that holds a run is refused
        shutil.rmtree(ROOT / words[words.index("--run-dir") + 1], ignore_errors=True)
    code = run_logged(words, log, env, _TIMEOUT_S)
    ended = f"not done after {_TIMEOUT_S} s" if code is None else f"exit code {code}"
    word, reason = ("passed", "") if code == 0 else ("failed", f"{ended}, see {log}")
    return Outcome(step, word, time.monotonic() - began, reason)


def write_page(page: Path, found: Sequence[Outcome], devices: Sequence[str]) -> None:
    """Put the table of outcomes between the page's two marks."""
    rows = [f"| {o.step.name} | `{o.step.command}` | {o.word} | {o.seconds:.0f} |" for o in found]
    head = f"{date.today().isoformat()}, {len(devices)} x {devices[0]}:"
    table = [head, "", "| step | command | result | s |", "|---|---|---|---|", *rows]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, *table, END]) + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""A first day on GPUs: every command in its order, each of which needs the one before it.

    python -m benchmarks.gpu_smoke [--write-docs] [--only NAME ...]

What make gpu-smoke runs.  It ends at the first step that fails; exit code 0 where all passed, 1 where one
failed, 3 where one was not run for want of GPUs.  Output lies in runs/gpu, and --write-docs puts a table of
it into docs/run/gpu_results.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.measure import run_logged

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/run/gpu_results.md"
BEGIN, END = "<!-- gpu-smoke: begin -->", "<!-- gpu-smoke: end -->"
NOT_RUN = 3
_TIMEOUT_S = 1800
# of shapes that kernels are made for: those of the demo fail, or pass, for reasons of their own
_TOY = "--config configs/tiny_gpu.toml"
_PROVED = "--num-rollout 3 --ci-test --check-weight-update-equal --run-dir"
_TURNS = "--colocate --max-weight-staleness 0 --update-weight-transfer-mode shared_memory"


@dataclass(frozen=True)
class Step:
    """One command, the GPUs that it needs, and what it proves."""

    name: str
    command: str
    proves: str
    num_gpus: int = 1


def _job(name: str, flags: str, proves: str, num_gpus: int = 1, num_ranks: int = 1) -> Step:
    """A short R3 job of the toy in ``runs/gpu/NAME``, in which every step is proved."""
    launch = f"torchrun --nproc-per-node {num_ranks} --master-port 29500 train_async.py {_TOY}"
    command = " ".join(filter(None, (launch, flags, _PROVED)))
    return Step(name, f"{command} runs/gpu/{name}", proves, num_gpus)


# variants and figures behind what they are variants of; topologies last, whose bounds no device has met
STEPS = (
    Step(
        "model",
        "r3train make-tiny-model --size gpu --output runs/tiny_gpu --force",
        "the package is installed",
    ),
    Step(
        "doctor",
        "r3train doctor",
        "versions go together, Transformer Engine imports, one cuDNN is loaded; GPUs, shared memory",
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
    _job("job", "", "weights reach the server bit for bit, and every step is proved", 2),
    Step(
        "evidence",
        "r3train check-evidence runs/gpu/job",
        "the evidence of that job holds, read alone",
        2,
    ),
    _job("colocated", _TURNS, "server and rank colocated on one GPU, every step proved"),
    Step(
        "colocated_evidence",
        "r3train check-evidence runs/gpu/colocated",
        "the evidence of that job holds, read alone",
    ),
    Step(
        "replay_overhead",
        "python -m benchmarks.replay_overhead --rounds 15 --output runs/gpu/replay_overhead.json",
        "what replay and its check cost of a step, in bfloat16",
    ),
    Step(
        "weight_sync",
        "python -m benchmarks.weight_sync --output runs/gpu/weight_sync.json",
        "what an update costs, in bfloat16",
        2,
    ),
    Step(
        "rollout_rate",
        "python -m benchmarks.rollout_rate --output runs/gpu/rollout_rate.json",
        "tokens per second with routed experts and without",
    ),
    _job("adapters", f"{_TURNS} --lora-rank 8", "adapters on Transformer Engine's layers, merged"),
    _job(
        "optimizer",
        f"{_TURNS} --optimizer-override use_precision_aware_optimizer=true"
        " --optimizer-override exp_avg_dtype=bf16 --optimizer-override exp_avg_sq_dtype=bf16",
        "Transformer Engine's FusedAdam with moments in bfloat16, which move to the host and back",
    ),
    _job(
        "tp2",
        f"{_TURNS} --tensor-model-parallel-size 2 --sequence-parallel",
        "a job over two tensor ranks",
        2,
        num_ranks=2,
    ),
    _job(
        "cp2",
        f"{_TURNS} --context-parallel-size 2",
        "a job over two context-parallel ranks",
        2,
        num_ranks=2,
    ),
    Step(
        "topologies",
        "r3train verify --bf16",
        "R3 over all topologies that the GPUs hold (with one GPU those of one rank), against two oracles:"
        " in float32, and in bfloat16 within 5% forward and 30% in gradients; context parallelism in bfloat16 alone",
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
    given = parser.parse_args(arguments)
    devices = gpu_names()
    steps = [step for step in STEPS if given.only is None or step.name in given.only]
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
    """Run the steps in order, and none behind one that failed; print a line for each."""
    found: list[Outcome] = []
    for step in steps:
        outcome = _outcome(step, num_gpus, found, logs)
        found.append(outcome)
        took = f" in {outcome.seconds:.0f} s" if outcome.word != "not run" else ""
        print(f"{step.name:>16}  {outcome.word}{took}{outcome.reason and ': ' + outcome.reason}")
    return found


def _outcome(step: Step, num_gpus: int, before: Sequence[Outcome], logs: Path) -> Outcome:
    if not num_gpus:
        return Outcome(step, "not run", 0.0, "no CUDA device")
    if num_gpus < step.num_gpus:
        return Outcome(step, "not run", 0.0, f"needs {step.num_gpus} GPUs, {num_gpus} here")
    if failed := [other.step.name for other in before if other.word == "failed"]:
        return Outcome(step, "not run", 0.0, f"{failed[0]} failed")
    logs.mkdir(parents=True, exist_ok=True)
    log, began = logs / f"{step.name}.log", time.monotonic()
    bin_dir = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"}
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

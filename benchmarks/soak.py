"""A long run with a fault every few steps: is every prompt trained once, and does nothing leak?

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/soak.py --steps 200 --fault-every 20

Faults, in turn: the server killed, the server stopped (hung), a trainer rank killed, SIGUSR1.
Prints one line a fault and a verdict; exits with 1 when a prompt is lost or doubled, when a process's
memory grows by more than 5% between two windows of its life, or when anything is left behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from r3train.loop import prompt_log
from r3train.tiny import TinyOptions, build

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ("kill_server", "hang_server", "kill_rank", "stop_job")
# a process settles in its first samples: caches fill, buffers reach their size
SETTLE_S = 15.0
MIN_SAMPLES = 20


def command(run_dir: Path, data: Path, steps: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [
        *torchrun,
        *("--nproc-per-node", "2", "--max-restarts", "1000", "train_async.py"),
        *("--config", "configs/tiny_cpu.toml", "--run-dir", str(run_dir)),
        *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "prompts.jsonl")),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--no-plot"),
        *("--no-tensorboard", "--use-rollout-routing-replay", "--enable-r3-correctness-check"),
        *("--num-rollout", str(steps), "--max-engine-restarts", "1000"),
        *("--engine-restart-backoff-s", "0", "--engine-health-timeout-s", "10"),
        *("--save", str(run_dir / "ck"), "--save-interval", "5", "--save-keep-last", "2"),
        *("--async-save", "--auto-resume"),
    ]


def role(process: psutil.Process) -> str:
    """A name for what a process does, or "" for one that does not matter here."""
    try:
        words = " ".join([process.name(), *process.cmdline()])
        if "sglang" in words and "server_guard" not in words:
            return "scheduler" if "scheduler" in words else "server"
        if "train_async.py" in words and "torch.distributed.run" not in words:
            return f"rank {process.environ()['RANK']}"
    except (psutil.Error, KeyError):
        pass
    return ""


class Soak:
    """One soak; ``problems`` says what went wrong."""

    def __init__(self, directory: Path, steps: int, fault_every: int):
        self.run_dir = directory / "run"
        self.data = directory / "tiny"
        self.steps, self.fault_every = steps, fault_every
        self.problems: list[str] = []
        self.seen: set[psutil.Process] = set()
        self.memory: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self.handles: dict[tuple[str, int], list[int]] = defaultdict(list)

    def run(self) -> list[str]:
        build(self.data, TinyOptions(), force=True)
        shared_before = set(Path("/dev/shm").iterdir())
        next_fault, number = self.fault_every, 0
        job = self._start()
        try:
            while True:
                code = job.poll()
                if code is not None:
                    if self._trained() >= self.steps:
                        break
                    if code != 0:
                        self.problems.append(f"the job ended with {code} at {self._trained()}")
                        return self.problems
                    job = self._start()  # as a scheduler requeues a job that exited with 0
                self._measure(job)
                if next_fault <= self._trained() < self.steps - 2:
                    self._inject(job, FAULTS[number % len(FAULTS)])
                    next_fault, number = next_fault + self.fault_every, number + 1
                time.sleep(0.5)
        finally:
            for process in [*job.children(recursive=True), job] if job.is_running() else []:
                process.kill()
        self._audit(shared_before)
        return self.problems

    def _start(self) -> psutil.Popen:
        out = (self.run_dir.parent / "out.txt").open("a")
        return psutil.Popen(
            command(self.run_dir, self.data, self.steps),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def _trained(self) -> int:
        """Rollouts trained, counting what was trained again once."""
        path = self.run_dir / prompt_log.FILE
        return len(prompt_log.read([self.run_dir])) if path.exists() else 0

    def _processes(self, job: psutil.Popen) -> dict[str, psutil.Process]:
        try:
            tree = job.children(recursive=True)
        except psutil.Error:
            return {}
        self.seen.update(tree)
        return {name: process for process in tree if (name := role(process))}

    def _measure(self, job: psutil.Popen) -> None:
        for name, process in self._processes(job).items():
            try:
                if time.time() - process.create_time() < SETTLE_S:
                    continue
                key = name, process.pid
                self.memory[key].append((time.time(), process.memory_full_info().uss))
                self.handles[key].append(process.num_fds())
            except psutil.Error:
                continue

    def _inject(self, job: psutil.Popen, fault: str) -> None:
        found = self._processes(job)
        victim, number = {
            "kill_server": ("scheduler", signal.SIGKILL),
            "hang_server": ("scheduler", signal.SIGSTOP),
            "kill_rank": ("rank 1", signal.SIGKILL),
            "stop_job": ("rank 0", signal.SIGUSR1),
        }[fault]
        print(f"{time.strftime('%H:%M:%S')} step {self._trained()}: {fault}", flush=True)
        if victim in found:
            found[victim].send_signal(number)

    def _audit(self, shared_before: set[Path]) -> None:
        records = prompt_log.read([self.run_dir])
        for what, values in prompt_log.audit(records).items():
            if values:
                self.problems.append(f"{what}: {values}")
        groups = [g for record in records for g in record["group_ids"]]
        if groups != list(range(4 * self.steps)):
            self.problems.append("the groups trained are not 0, 1, 2, ... in order")
        for key, samples in self.memory.items():
            if len(samples) < 2 * MIN_SAMPLES:
                continue  # it did not live long enough to say
            early = sorted(size for _, size in samples[:MIN_SAMPLES])[MIN_SAMPLES // 2]
            late = sorted(size for _, size in samples[-MIN_SAMPLES:])[MIN_SAMPLES // 2]
            growth = late / early - 1
            name = f"{key[0]} ({key[1]})"
            print(f"{name}: {early / 1e6:.0f} MB -> {late / 1e6:.0f} MB ({growth:+.1%})")
            if growth > 0.05:
                self.problems.append(f"{name} grew by {growth:.1%}")
            first, last = max(self.handles[key][:MIN_SAMPLES]), self.handles[key][-1]
            if last > first + 8:
                self.problems.append(f"{name} went from {first} to {last} file descriptors")
        time.sleep(2)
        left = [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left:
            self.problems.append(f"processes left: {[(p.pid, p.name()) for p in left]}")
        shared = set(Path("/dev/shm").iterdir()) - shared_before
        if shared:
            self.problems.append(f"shared-memory files left: {sorted(p.name for p in shared)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fault-every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="r3train-soak-") as directory:
        soak = Soak(Path(directory), options.steps, options.fault_every)
        problems = soak.run()
        if problems:
            print((Path(directory) / "out.txt").read_text()[-5000:])
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("soak failed" if problems else "soak passed: every prompt once, nothing left behind")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

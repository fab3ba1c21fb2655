"""A long run with a fault every few steps: is every prompt trained once, and does nothing leak?

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/soak.py --steps 200 --fault-every 20

Faults, in turn: the server killed, the server stopped (hung), a trainer rank killed, SIGUSR1.
Prints one line a fault and a verdict; exits with 1 when

- a prompt is lost or trained twice;
- a process grows by more than 5% over its life from step 50 on, or one grows from one of its role to
  the next but one that lived as long (faults end processes, and a leak may span their lives);
- a process gathers file descriptors;
- a process, a listening port or a shared-memory file is left at the end.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak_traces import (  # noqa: E402
    Trace,
    growth_across_lives,
    growth_within_life,
    handles_gathered,
)
from r3train.loop import prompt_log  # noqa: E402
from r3train.tiny import TinyOptions, build  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ("kill_server", "hang_server", "kill_rank", "stop_job")
GROWTH = 0.05
SAMPLE_EVERY_S = 0.25


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
        *("--async-save", "--auto-resume", "--rollout-segment-len", "3"),
    ]


def role(process: psutil.Process, job: psutil.Process) -> str:
    """A name for what a process does; a short-lived helper (a forked writer) has none: ""."""
    try:
        words = " ".join([process.name(), *process.cmdline()])
        if process.pid == job.pid:
            return "torchrun"
        if "server_guard" in words:
            return "guard"
        if "resource_tracker" in words:
            return ""
        if "sglang" in words:
            # the name of a process holds 15 characters
            names = {"sglang::schedul": "scheduler", "sglang::detoken": "detokenizer"}
            return names.get(process.name()[:15], "server")
        if "train_async.py" in words and process.ppid() == job.pid:
            return f"rank {process.environ()['RANK']}"
    except (psutil.Error, KeyError):
        pass
    return ""


def own_memory(pid: int) -> int:
    """Resident bytes that are no file's.

    Not psutil's "unique" memory: that of a rank falls while a forked writer shares its pages.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(kib) * 1024


def shared_memory_of(pid: int) -> set[Path]:
    """Files of /dev/shm that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(x[x.index("/dev/shm/") :]) for x in lines if "/dev/shm/" in x}


def semaphores_of_others(files: set[Path]) -> set[Path]:
    """Named semaphores that a living resource tracker may be there to remove: nobody maps them."""
    trackers = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        if "resource_tracker" in " ".join(process.info["cmdline"] or []):
            trackers.append(process.info["create_time"])
    oldest = min(trackers, default=float("inf"))
    return {file for file in files if file.exists() and file.stat().st_ctime >= oldest - 1}


class Soak:
    """One soak; ``problems`` says what went wrong."""

    def __init__(self, directory: Path, steps: int, fault_every: int):
        self.run_dir = directory / "run"
        self.data = directory / "tiny"
        self.steps, self.fault_every = steps, fault_every
        self.problems: list[str] = []
        self.injected: list[str] = []
        self.seen: set[psutil.Process] = set()
        self.ports: set[int] = set()
        self.shared: set[Path] = set()
        self.traces: dict[tuple[str, int], Trace] = {}

    def run(self) -> list[str]:
        build(self.data, TinyOptions(), force=True)
        shared_before = set(Path("/dev/shm").iterdir())
        next_fault = self.fault_every
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
                processes = self._processes(job)
                self._measure(processes)
                if next_fault <= self._trained() < self.steps - 2:
                    fault = FAULTS[len(self.injected) % len(FAULTS)]
                    if self._inject(processes, fault):
                        next_fault += self.fault_every
                time.sleep(SAMPLE_EVERY_S)
        finally:
            for process in [*job.children(recursive=True), job] if job.is_running() else []:
                process.kill()
        self._audit()
        self._compare()
        self._look_for_leftovers(shared_before)
        return self.problems

    def _start(self) -> psutil.Popen:
        with (self.run_dir.parent / "out.txt").open("a") as out:
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
            tree = [job, *job.children(recursive=True)]
        except psutil.Error:
            return {}
        self.seen.update(tree[1:])
        return {name: process for process in tree if (name := role(process, job))}

    def _measure(self, processes: dict[str, psutil.Process]) -> None:
        step = self._trained()
        for name, process in processes.items():
            try:
                memory, handles = own_memory(process.pid), process.num_fds()
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        self.ports.add(connection.laddr.port)
            except (psutil.Error, OSError):
                continue
            self.shared |= shared_memory_of(process.pid)
            trace = self.traces.setdefault((name, process.pid), Trace(name, process.pid))
            trace.add(time.time() - process.create_time(), step, memory, handles)

    def _inject(self, processes: dict[str, psutil.Process], fault: str) -> bool:
        victim, number = {
            "kill_server": ("scheduler", signal.SIGKILL),
            "hang_server": ("scheduler", signal.SIGSTOP),
            "kill_rank": ("rank 1", signal.SIGKILL),
            "stop_job": ("rank 0", signal.SIGUSR1),
        }[fault]
        if victim not in processes:
            return False
        print(f"{time.strftime('%H:%M:%S')} step {self._trained()}: {fault}", flush=True)
        processes[victim].send_signal(number)
        self.injected.append(fault)
        return True

    def _audit(self) -> None:
        records = prompt_log.read([self.run_dir])
        for what, values in prompt_log.audit(records).items():
            if values:
                self.problems.append(f"{what}: {values}")
        groups = [g for record in records for g in record["group_ids"]]
        if groups != list(range(4 * self.steps)):
            self.problems.append("the groups trained are not 0, 1, 2, ... in order")
        expected = len(range(self.fault_every, self.steps - 2, self.fault_every))
        if len(self.injected) != expected:
            self.problems.append(f"{len(self.injected)} faults injected, expected {expected}")
        lives = len([key for key in self.traces if key[0] == "rank 0"])
        ended = sum(fault in ("kill_rank", "stop_job") for fault in self.injected)
        if lives != 1 + ended:
            self.problems.append(f"rank 0 was started {lives} times, {ended} faults ended it")

    def _compare(self) -> None:
        of_role: dict[str, list[Trace]] = defaultdict(list)
        for trace in self.traces.values():
            of_role[trace.role].append(trace)
        for name, traces in sorted(of_role.items()):
            findings = [growth_within_life(t) for t in traces]
            findings += growth_across_lives(traces)
            findings = [f for f in findings if f is not None]
            if not findings:
                print(f"{name}: {len(traces)} lives, none long enough to compare")
                continue
            worst = max(findings, key=lambda f: f.growth)
            print(f"{name}: {len(traces)} lives, {len(findings)} comparisons, worst {worst}")
            self.problems += [f"{name}: {f}" for f in findings if f.growth > GROWTH]
            self.problems += [text for t in traces if (text := handles_gathered(t))]

    def _look_for_leftovers(self, shared_before: set[Path]) -> None:
        time.sleep(2)
        left = [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left:
            self.problems.append(f"processes left: {[(p.pid, p.name()) for p in left]}")
        listening = {
            c.laddr.port: c.pid
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port in self.ports
        }
        if listening:
            self.problems.append(f"ports still listened on, by process: {listening}")
        new = set(Path("/dev/shm").iterdir()) - shared_before
        semaphores = {file for file in new if file.name.startswith("sem.mp-")}
        shared = (new & self.shared) | (semaphores - semaphores_of_others(semaphores))
        if shared:
            self.problems.append(f"shared-memory files left: {sorted(p.name for p in shared)}")
        print(f"{len(self.seen)} processes, {len(self.ports)} listening ports seen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fault-every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="r3train-soak-") as directory:
        soak = Soak(Path(directory), options.steps, options.fault_every)
        problems = soak.run()
        if problems:
            lines = (Path(directory) / "out.txt").read_text().splitlines()
            print("\n".join(line for line in lines if "error" in line.lower())[-5000:])
            print("\n".join(lines[-20:]))
    print(f"{len(soak.injected)} faults injected")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("soak failed" if problems else "soak passed: every prompt once, nothing left behind")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

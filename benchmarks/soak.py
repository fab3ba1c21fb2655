"""A long run with a fault every few steps: every prompt is trained once, and nothing leaks.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/soak.py --steps 200 --fault-every 20

Faults, in turn: the server killed, the server stopped (hung), a trainer rank killed, SIGUSR1.
Prints one line a fault and a verdict; exits with 1 when

- a prompt is lost or trained twice;
- a process grows by more than 5% over its life from step 50 on, or one grows from one of its role to
  the next but one that lived as long (faults end processes, and a leak may span their lives);
- a process gathers handles of any kind, or holds more connections to a server than its requests
  in flight account for;
- a process, a listening socket or a shared-memory file is left at the end.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak_processes import (  # noqa: E402
    ListeningSockets,
    count_handles,
    open_handles,
    own_memory,
    role,
    semaphores_of_others,
    server_port,
    shared_memory_of,
    tcp_sockets,
)
from benchmarks.soak_traces import (  # noqa: E402
    Trace,
    growth_across_lives,
    growth_within_life,
    handles_gathered,
)
from benchmarks.tiny_jobs import R3, ROOT, environment, job_flags, torchrun  # noqa: E402
from r3train.config import RunConfig  # noqa: E402
from r3train.loop import prompt_log  # noqa: E402
from r3train.tiny import TinyOptions, build  # noqa: E402

# fault -> role of the process that gets the signal, and the signal
FAULTS = {
    "kill_server": ("scheduler", signal.SIGKILL),
    "hang_server": ("scheduler", signal.SIGSTOP),
    "kill_rank": ("rank 1", signal.SIGKILL),
    "stop_job": ("rank 0", signal.SIGUSR1),
}
ENDS_THE_RANKS = ("kill_rank", "stop_job")
GROWTH = 0.05
SAMPLE_EVERY_S = 0.25


def command(run_dir: Path, tiny: Path, steps: int) -> list[str]:
    flags = [
        *R3,
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
        *("--num-rollout", str(steps), "--max-engine-restarts", "1000"),
        *("--engine-restart-backoff-s", "0", "--engine-health-timeout-s", "10"),
        *("--save", str(run_dir / "ck"), "--save-interval", "5", "--save-keep-last", "2"),
        *("--async-save", "--auto-resume", "--rollout-segment-len", "3"),
    ]
    return torchrun(2, "--max-restarts", "1000", *job_flags(tiny, run_dir, *flags))


def connection_bound(config: RunConfig) -> int:
    """Connections to its servers that a job may hold at once.

    One a request in flight (an idle one is used again before another is made), and for each server
    one of the control's calls and one that asks for its health.
    """
    rollout = config.rollout
    in_flight = min(rollout.max_concurrency, rollout.buffer_groups * rollout.n_samples_per_prompt)
    return in_flight + 2 * rollout.rollout_num_engines


class Soak:
    """One soak; ``problems`` says what went wrong."""

    def __init__(self, directory: Path, steps: int, fault_every: int):
        self.run_dir = directory / "run"
        self.data = directory / "tiny"
        self.steps, self.fault_every = steps, fault_every
        self.problems: list[str] = []
        self.injected: list[str] = []
        self.seen: set[psutil.Process] = set()
        self.server_ports: set[int] = set()
        self.listening = ListeningSockets()
        self.shared: set[Path] = set()
        self.traces: dict[tuple[str, int], Trace] = {}
        # told to end, or done: the memory that a process takes in order to end is no growth
        self.ending: set[psutil.Process] = set()

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
                    fault = list(FAULTS)[len(self.injected) % len(FAULTS)]
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
                env=environment(),
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
        step, sockets = self._trained(), tcp_sockets()
        if "guard" in processes and (port := server_port(processes["guard"])) is not None:
            self.server_ports.add(port)
        for name, process in processes.items():
            try:
                memory, targets = own_memory(process.pid), open_handles(process.pid)
                age_s = time.time() - process.create_time()
            except (psutil.Error, OSError):
                continue
            if not targets:  # it is ending, and holds nothing any more
                continue
            self.listening.note(targets, sockets)
            self.shared |= shared_memory_of(process.pid)
            if step >= self.steps:
                self.ending.add(process)
            if process not in self.ending:
                trace = self.traces.setdefault((name, process.pid), Trace(name, process.pid))
                trace.add(age_s, step, memory, count_handles(targets, sockets, self.server_ports))

    def _inject(self, processes: dict[str, psutil.Process], fault: str) -> bool:
        victim, number = FAULTS[fault]
        if victim not in processes:
            return False
        print(f"{time.strftime('%H:%M:%S')} step {self._trained()}: {fault}", flush=True)
        if fault in ENDS_THE_RANKS:
            outlives = ("torchrun",) if fault == "kill_rank" else ()
            self.ending |= {p for name, p in processes.items() if name not in outlives}
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
        ended = sum(fault in ENDS_THE_RANKS for fault in self.injected)
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
            self._judge_handles(name, traces)

    def _judge_handles(self, name: str, traces: list[Trace]) -> None:
        bound = connection_bound(RunConfig.from_toml(self.run_dir / "config.toml"))
        for trace in traces:
            self.problems += handles_gathered(trace, max_connections=bound)
        longest = max(traces, key=lambda t: len(t.samples))
        floors = longest.floors()
        if floors is not None:
            early, late = (", ".join(f"{n} {kind}" for kind, n in c.items()) for c in floors)
            print(f"{name}: longest life, held throughout: {early}; at its end: {late}")

    def _look_for_leftovers(self, shared_before: set[Path]) -> None:
        time.sleep(2)
        left = [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left:
            self.problems.append(f"processes left: {[(p.pid, p.name()) for p in left]}")
        ports = self.listening.left()
        if ports:
            self.problems.append(f"sockets of the job still listen on ports {ports}")
        new = set(Path("/dev/shm").iterdir()) - shared_before
        semaphores = {file for file in new if file.name.startswith("sem.mp-")}
        shared = (new & self.shared) | (semaphores - semaphores_of_others(semaphores))
        if shared:
            self.problems.append(f"shared-memory files left: {sorted(p.name for p in shared)}")
        print(f"{len(self.seen)} processes, {len(self.listening.of_job)} listening sockets seen")


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

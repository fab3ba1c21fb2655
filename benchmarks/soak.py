"""A long run with faults at given steps: every prompt is trained once, and nothing leaks.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/soak.py --steps 200 --fault-every 20
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/soak.py --steps 20 \
        --chaos kill_engine@4,drop_rows@8,retract@11,full_disk@13

Faults: kill_engine, hang_engine (a server killed, stopped), kill_rank, stop_job (SIGUSR1), retract (a
server takes its running requests out of its KV cache), drop_rows (an answer lacks rows of its routes),
full_disk (at the next save).  --fault-every takes the first four in turn.

Flags behind ``--`` are of a run of yours, which takes the place of the tiny model's: it is trained for
--steps on --ranks ranks, with what it needs in order to go on after a fault.

Prints one line a fault and a verdict; exits with 1 when

- a prompt is lost or trained twice;
- a fault that was planned did not happen;
- a process grows by more than 5% over its life from step 50 on, or one grows from one of its role to
  the next but one that lived as long (faults end processes, and a leak may span their lives);
- a process gathers handles of any kind, threads or shared memory, or holds more connections to a server
  than its requests in flight account for;
- without faults, a step at the end logs more than 5% more bytes than one before;
- a process, a listening socket or a shared-memory file is left at the end.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import click
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chaos import (  # noqa: E402
    ENDS_THE_RANKS,
    FAULTS,
    ORDERED,
    Planned,
    PROGRAM,
    read_plan,
    RETRACT,
    RETRACTED,
    retract,
    SIGNALS,
)
from benchmarks.soak_processes import (  # noqa: E402
    ListeningSockets,
    count_handles,
    open_handles,
    own_memory,
    role,
    semaphores_of_others,
    SHARED,
    server_port,
    shared_memory_of,
    tcp_sockets,
    THREADS,
)
from benchmarks.soak_traces import (  # noqa: E402
    FROM_STEP,
    Trace,
    growth_across_lives,
    growth_within_life,
    handles_gathered,
)
from benchmarks.tiny_jobs import (  # noqa: E402
    R3,
    ROOT,
    environment,
    job_flags,
    step_metrics,
    torchrun,
)
from r3train.config import RunConfig  # noqa: E402
from r3train.config.options import parse_train_flags  # noqa: E402
from r3train.engine.key import ENGINE_KEY_VARIABLE  # noqa: E402
from r3train.loop import prompt_log  # noqa: E402
from r3train.verify.tiny import TinyOptions, build  # noqa: E402

GROWTH = 0.05
SAMPLE_EVERY_S = 0.25
IN_TURN = tuple(SIGNALS)  # with --fault-every
TINY = (
    *"--rollout-batch-size 4 --n-samples-per-prompt 4".split(),
    *"--engine-restart-backoff-s 0 --engine-health-timeout-s 10".split(),
    *"--save-interval 5 --save-keep-last 2 --async-save --rollout-segment-len 3".split(),
)


def needed(run_dir: Path, steps: int) -> list[str]:
    """Flags without which a run does not go on after a fault."""
    return [
        *f"--run-dir {run_dir} --num-rollout {steps} --save {run_dir / 'ck'}".split(),
        *"--auto-resume --max-engine-restarts 1000".split(),
    ]


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

    def __init__(
        self, directory: Path, steps: int, plan: list[Planned], ranks: int, flags: list[str]
    ):
        """Plan a soak; flags: of a run of the user's, none for the tiny model's."""
        self.run_dir = directory / "run"
        self.orders = directory / "orders"
        self.steps, self.plan, self.ranks = steps, plan, ranks
        if not flags:
            build(directory / "tiny", TinyOptions(), force=True)
            flags = [*job_flags(directory / "tiny", self.run_dir, *R3, *TINY)[1:]]
        program = ["-m", PROGRAM, str(self.orders), *flags, *needed(self.run_dir, steps)]
        self.command = torchrun(ranks, "--max-restarts", "1000", *program)
        self.key = secrets.token_hex(16)
        self.problems: list[str] = []
        self.injected: list[str] = []
        self.retraction_counted = False
        self.seen: set[psutil.Process] = set()
        self.server_ports: set[int] = set()
        self.listening = ListeningSockets()
        self.shared: set[Path] = set()
        self.traces: dict[tuple[str, int], Trace] = {}
        self.logged: dict[int, int] = {}  # steps trained -> bytes of metrics, evidence and logs
        # told to end, or done: the memory that a process takes in order to end is no growth
        self.ending: set[psutil.Process] = set()

    def run(self) -> list[str]:
        self.orders.mkdir(parents=True, exist_ok=True)
        shared_before = set(Path("/dev/shm").iterdir())
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
                planned = self.plan[len(self.injected) :]
                due = planned and planned[0].step <= self._trained() < self.steps
                if due and not self._retraction_uncounted():
                    self._inject(processes, planned[0].fault)
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
                self.command,
                cwd=ROOT,
                env={**environment(), ENGINE_KEY_VARIABLE: self.key},
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
        if step not in self.logged:
            files = [*self.run_dir.glob("*.jsonl"), *self.run_dir.glob("*/*.jsonl")]
            files += self.run_dir.glob("logs/*.log")
            self.logged[step] = sum(file.stat().st_size for file in files)
        if "guard" in processes and (port := server_port(processes["guard"])) is not None:
            self.server_ports.add(port)
        for name, process in processes.items():
            try:
                memory, targets = own_memory(process.pid), open_handles(process.pid)
                age_s, threads = time.time() - process.create_time(), process.num_threads()
            except (psutil.Error, OSError):
                continue
            if not targets:  # it is ending, and holds nothing any more
                continue
            self.listening.note(targets, sockets)
            shared = shared_memory_of(process.pid)
            self.shared |= shared
            if step >= self.steps:
                self.ending.add(process)
            if process not in self.ending:
                trace = self.traces.setdefault((name, process.pid), Trace(name, process.pid))
                handles = count_handles(targets, sockets, self.server_ports)
                handles.update({THREADS: threads, SHARED: len(shared)})
                trace.add(age_s, step, memory, handles)

    def _retraction_uncounted(self) -> bool:
        """True while a retraction is in no step's metrics: a fault would take its count along."""
        if self.retraction_counted or RETRACT not in self.injected:
            return False
        self.retraction_counted = any(
            s.get("rollout/retracted") for s in step_metrics(self.run_dir)
        )
        return not self.retraction_counted

    def _inject(self, processes: dict[str, psutil.Process], fault: str) -> None:
        """Do the fault, or leave it for another time if its victim is not there."""
        done = f"{time.strftime('%H:%M:%S')} step {self._trained()}: {fault}"
        victim, number = SIGNALS.get(fault, ("rank 0", None))
        victim = f"rank {self.ranks - 1}" if victim == "rank" else victim
        if victim not in processes:
            return
        if fault == RETRACT:
            port = server_port(processes["guard"]) if "guard" in processes else None
            try:
                if port is None or not retract(port, self.key, self.orders.with_name(RETRACTED)):
                    return
            except OSError:  # it starts, or ends
                return
        elif fault in ORDERED:
            (self.orders / fault).touch()
        if fault in ENDS_THE_RANKS:
            outlives = () if fault == "stop_job" else ("torchrun",)
            self.ending |= {p for name, p in processes.items() if name not in outlives}
        if number is not None:
            processes[victim].send_signal(number)
        print(done, flush=True)
        self.injected.append(fault)

    def _audit(self) -> None:
        config = RunConfig.from_toml(self.run_dir / "config.toml")
        records = prompt_log.read([self.run_dir])
        for what, values in prompt_log.faults(records).items():
            if values:
                self.problems.append(f"{what}: {values}")
        groups = [g for record in records for g in record["group_ids"]]
        everything = list(range(config.rollout.rollout_batch_size * self.steps))
        rollout = config.rollout
        in_order = rollout.groups_per_rollout == rollout.rollout_batch_size
        if in_order and not rollout.rollout_filter and groups != everything:
            self.problems.append("the groups trained are not 0, 1, 2, ... in order")
        not_done = [fault for _, fault in self.plan[len(self.injected) :]]
        not_done += [order.name for order in self.orders.iterdir()]
        if self._retraction_uncounted():
            not_done.append(RETRACT)
        if not_done:
            self.problems.append(f"faults that did not happen: {', '.join(not_done)}")
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
        self._judge_logs()

    def _judge_logs(self) -> None:
        """Compare the bytes that are logged a step; a fault is logged too, so that it grows then."""
        steps = sorted(step for step in self.logged if step >= min(FROM_STEP, self.steps // 2))
        rates = [
            (self.logged[b] - self.logged[a]) / (b - a)
            for part in (steps[: len(steps) // 2], steps[len(steps) // 2 :])
            if len(part) > 1
            for a, b in [(part[0], part[-1])]
        ]
        if len(rates) < 2:
            return
        early, late = rates
        print(f"logs: {early:,.0f} bytes per step became {late:,.0f}")
        if not self.plan and late > early * (1 + GROWTH):
            self.problems.append(f"logs: {early:,.0f} bytes per step became {late:,.0f}")

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
    parser.add_argument("--fault-every", type=int, default=20, help="the first four, in turn")
    parser.add_argument("--chaos", metavar="FAULT@STEP,...", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="keeps the run; else a temporary one")
    parser.add_argument("flags", nargs="*", help="behind --: of a run of yours")
    options = parser.parse_args()
    steps = range(options.fault_every, options.steps - 2, options.fault_every)
    plan = [Planned(step, IN_TURN[n % len(IN_TURN)]) for n, step in enumerate(steps)]
    if options.chaos is not None:
        try:
            plan = read_plan(options.chaos)
        except ValueError as error:
            parser.error(f"--chaos {error}")
        if plan[-1].step >= options.steps:
            parser.error(f"--chaos: expected steps below --steps {options.steps}")
    if options.flags and any(planned.fault == RETRACT for planned in plan):
        try:
            mode = parse_train_flags(options.flags, prog_name="--").rollout.pause_generation_mode
        except click.ClickException as error:
            parser.error(error.format_message())
        if mode != "drain":
            parser.error(f"--chaos retract needs --pause-generation-mode drain, got {mode}")
    with ExitStack() as stack:
        directory = options.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="r3train-soak-"))
        )
        if (directory / "run").exists():
            parser.error(f"--directory {directory}: holds a run already")
        directory.mkdir(parents=True, exist_ok=True)
        soak = Soak(directory, options.steps, plan, options.ranks, options.flags)
        problems = soak.run()
        if problems:
            lines = (directory / "out.txt").read_text().splitlines()
            print("\n".join(line for line in lines if "error" in line.lower())[-5000:])
            print("\n".join(lines[-20:]))
    print(f"{len(soak.injected)} faults injected")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("soak failed" if problems else "soak passed: every prompt once, nothing left behind")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

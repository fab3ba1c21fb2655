"""Jobs whose servers join, leave, hang and die at seeded moments: each trains what an undisturbed one does.

    python -m benchmarks.fleet_chaos --jobs 60 [--seed 0] [--steps 10] [--mode disk]

Answers are greedy and no sample is of older weights, so that the last weights are, bit for bit, those of a job
whose server nothing happens to.  Every prompt must be trained once, and ``check-evidence`` pass.  The fleet is
a directory of address files (--rollout-engines-file); a spare server is always being started.  What is done:

- join: a spare server's address is named;
- leave: a server is told to end, and says so before it does;
- withdraw: a server's address is taken back;
- kill: a server and all its processes are killed, its address stays;
- hang: they are stopped, and go on once the job has ended.

Each happens up to a second after a step, at which the weights are updated.  One line a job, with events that came too late in
parentheses, and a verdict.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measure import flags
from benchmarks.tiny_jobs import R3, ROOT, environment, job_flags, step_metrics, torchrun
from r3train.engine.key import ENGINE_KEY_VARIABLE
from r3train.loop import prompt_log
from r3train.verify.tiny import TinyOptions, build

KINDS = ("join", "leave", "withdraw", "kill", "hang")
MOST_SERVERS = 3
GROUPS = 4  # of a rollout
JOB = (
    *R3,
    *f"--rollout-batch-size {GROUPS} --n-samples-per-prompt 4 --rollout-max-response-len 64".split(),
    *"--rollout-ignore-eos --rollout-segment-len 16 --rollout-top-k 1 --entropy-coef 0.01".split(),
    *"--max-weight-staleness 0 --engine-health-timeout-s 5 --lr 5e-4".split(),
)


@dataclass(frozen=True)
class Event:
    """An event, so many seconds after a step has been written."""

    step: int
    seconds: float
    kind: str


def plan(seed: int, steps: int) -> list[Event]:
    """Two to four events of a job, at different steps, none after the last but one."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(1, steps - 1), draw.randint(2, 4)))
    return [Event(step, draw.uniform(0, 1), draw.choice(KINDS)) for step in at]


class Server:
    """``r3train serve`` of the tiny model; its address is named once it joins a fleet."""

    def __init__(self, tiny: Path, directory: Path, name: str) -> None:
        self.spare, self.name = directory / "spare" / name, name
        command = [
            sys.executable,
            "-m",
            "r3train.cli",
            "serve",
            "--config",
            "configs/tiny_cpu.toml",
        ]
        command += ["--hf-checkpoint", str(tiny / "model"), "--log", str(directory / f"{name}.log")]
        command += ["--address-file", str(self.spare)]
        with (directory / f"{name}.out").open("w") as out:
            self.process = psutil.Popen(
                command, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        while not self.spare.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} did not start: see {self.spare.parent.parent}")
            time.sleep(0.1)

    def send(self, number: int) -> None:
        """Send a signal to all of its processes, as to a machine."""
        for process in [*self.process.children(recursive=True), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
            self.process.wait()


class Fleet:
    """Servers that are named in ``directory/fleet``, and a spare one."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self.tiny, self.directory, self.named = tiny, directory, directory / "fleet"
        self.started = 0
        self.present: list[Server] = []
        self.gone: list[Server] = []  # ended, withdrawn or stopped
        for path in (self.named, directory / "spare"):
            path.mkdir()
        self.spare = self._start()

    def _start(self) -> Server:
        self.started += 1
        return Server(self.tiny, self.directory, f"server{self.started}")

    def join(self) -> None:
        server, self.spare = self.spare, self._start()
        server.wait()
        os.link(server.spare, self.named / server.name)
        self.present.append(server)

    def happen(self, kind: str, draw: random.Random) -> str:
        """Let it happen to a server of the fleet; a fleet of one or of the most may have another instead."""
        if kind == "join" and len(self.present) == MOST_SERVERS:
            kind = "leave"
        if kind == "join":
            self.join()
            return kind
        server = self.present.pop(draw.randrange(len(self.present)))
        self.gone.append(server)
        if kind == "leave":
            (self.named / server.name).unlink()
            server.process.terminate()
        elif kind == "withdraw":
            (self.named / server.name).unlink()
        else:
            server.send(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if not self.present:
            self.join()
        return kind

    def tidy(self) -> None:
        """End what has gone, and take its names away."""
        for server in self.gone:
            (self.named / server.name).unlink(missing_ok=True)
            server.end()
        self.gone.clear()

    def end(self) -> None:
        self.gone += [*self.present, self.spare]
        self.tidy()


def train(
    tiny: Path,
    run_dir: Path,
    fleet: Fleet,
    arguments: argparse.Namespace,
    events: list[Event],
    happened: list[str],
) -> None:
    """Run a job, and let the events happen, which are added to ``happened``.

    Those that came too late are added in parentheses.  Raises RuntimeError where it does not end well.
    """
    words = job_flags(tiny, run_dir, *JOB, "--num-rollout", str(arguments.steps))
    words += ["--rollout-engines-file", str(fleet.named), "--save-hf", str(run_dir / "hf")]
    words += ["--update-weight-transfer-mode", arguments.mode]
    output = run_dir.with_suffix(".txt")
    draw, waiting = random.Random(run_dir.name), list(events)
    with output.open("w") as out:
        job = psutil.Popen(
            torchrun(2, *words), cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 600
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{output}: not over within 600 s")
            done = len(step_metrics(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0
            if waiting and done >= waiting[0].step:
                event = waiting.pop(0)
                time.sleep(event.seconds)
                happened.append(fleet.happen(event.kind, draw))
            time.sleep(0.05)
    finally:
        for process in [*job.children(recursive=True), job] if job.is_running() else []:
            process.kill()
    if job.returncode:
        raise RuntimeError(f"{output}: ended with {job.returncode}")
    # a job may end while a server is awaited that an event asks for
    happened += [f"({event.kind})" for event in waiting]


def problems(run_dir: Path, weights: bytes | None, steps: int) -> list[str]:
    """Return the faults of a job that has ended; weights: those that it must have trained."""
    records = prompt_log.read([run_dir])
    found = [f"{what}: {values}" for what, values in prompt_log.faults(records).items() if values]
    groups = [group for record in records for group in record["group_ids"]]
    if groups != list(range(GROUPS * steps)):
        found.append(f"groups trained: {groups}")
    check = [sys.executable, "-m", "r3train.cli", "check-evidence", str(run_dir)]
    if subprocess.run(check, cwd=ROOT, capture_output=True, check=False).returncode:
        found.append("check-evidence does not pass")
    if weights is not None and last_weights(run_dir) != weights:
        found.append("other weights than those of the undisturbed job")
    return found


def last_weights(run_dir: Path) -> bytes:
    return (run_dir / "hf/model-00001-of-00001.safetensors").read_bytes()


def main() -> None:
    arguments = flags(__doc__, jobs=60, seed=0, steps=10, mode="disk")
    os.environ[ENGINE_KEY_VARIABLE] = secrets.token_hex(16)
    directory = Path(tempfile.mkdtemp(prefix="fleet_chaos"))
    tiny = directory / "tiny"
    build(tiny, TinyOptions(), force=True)
    bad, counts = 0, Counter[str]()
    fleet = Fleet(tiny, directory)
    try:
        fleet.join()
        weights = undisturbed(tiny, directory / "undisturbed", fleet, arguments)
        for number in range(arguments.seed, arguments.seed + arguments.jobs):
            run_dir, began = directory / f"job{number}", time.monotonic()
            happened: list[str] = []
            try:
                train(tiny, run_dir, fleet, arguments, plan(number, arguments.steps), happened)
                wrong = problems(run_dir, weights, arguments.steps)
            except RuntimeError as error:
                wrong = [str(error)]
            fleet.tidy()
            counts.update(kind for kind in happened if "(" not in kind)
            bad += bool(wrong)
            verdict, seconds = "; ".join(wrong) or "passed", time.monotonic() - began
            print(f"{number}: {' '.join(happened)}: {verdict}, {seconds:.0f} s", flush=True)
            if not wrong:
                shutil.rmtree(run_dir)
    finally:
        fleet.end()
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{arguments.jobs} jobs, {said}: {bad} failed" + (f", see {directory}" if bad else ""))
    if bad:
        sys.exit(1)
    shutil.rmtree(directory)


def undisturbed(tiny: Path, run_dir: Path, fleet: Fleet, arguments: argparse.Namespace) -> bytes:
    """Train with a server that nothing happens to; returns the weights."""
    train(tiny, run_dir, fleet, arguments, [], [])
    if wrong := problems(run_dir, None, arguments.steps):
        raise RuntimeError(f"{run_dir}: undisturbed, and {'; '.join(wrong)}")
    return last_weights(run_dir)


if __name__ == "__main__":
    main()

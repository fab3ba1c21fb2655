"""Run cases: one torchrun a world size, started again after a case that takes it down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from r3train.engine.server import free_port
from r3train.verify.topologies import TOPOLOGIES

EVIDENCE_RUN = "run"  # a case's run directory, next to its tables
_CASE_TIMEOUT_S = 240
_START_TIMEOUT_S = 240


@dataclass(frozen=True)
class Case:
    """One run of one topology, with what it reads and the directory that it writes.

    ``last_phase``: nothing beyond it is run.  ``order_seed`` shuffles the samples and turns the order
    of the microbatches round (the noise measurement).
    """

    case_id: str
    topology: str
    checkpoint: str
    rollouts: str
    output: str
    mutation: str | None = None  # its address
    last_phase: int = 5
    bf16: bool = False
    order_seed: int | None = None
    attention_backend: str = "auto"


@dataclass(frozen=True)
class Status:
    """The end of a case: ``error`` is empty where all ranks came through."""

    error: str
    seconds: float


def run(cases: Sequence[Case], scratch: Path, report: Callable[[str], None]) -> dict[str, Status]:
    """Run every case; returns its status by id.  Outputs are in each case's directory."""
    statuses: dict[str, Status] = {}
    sizes = {c.case_id: TOPOLOGIES[c.topology].world_size for c in cases}
    for world_size in sorted(set(sizes.values())):
        waiting = [c for c in cases if sizes[c.case_id] == world_size]
        while waiting:
            started = time.monotonic()
            _launch(world_size, waiting, scratch)
            done = 0
            for case in waiting:
                status = _read_status(case)
                if status is None:
                    break
                statuses[case.case_id] = status
                done += 1
            if done < len(waiting):
                # the launch ended inside this case: that is its verdict, the rest runs again
                victim = waiting[done]
                log = (scratch / f"launch{world_size}.log").read_text(
                    encoding="utf-8", errors="replace"
                )
                (Path(victim.output) / "launch.log").write_text(log, encoding="utf-8")
                last = [line for line in log.splitlines() if "Error" in line][-1:] or ["no output"]
                statuses[victim.case_id] = Status(f"the launch ended: {last[0]}", 0.0)
                done += 1
            report(f"{done} cases on {world_size} ranks in {time.monotonic() - started:.0f} s")
            waiting = waiting[done:]
    return statuses


def _read_status(case: Case) -> Status | None:
    file = Path(case.output) / "status.json"
    return Status(**json.loads(file.read_bytes())) if file.is_file() else None


def _launch(world_size: int, cases: Sequence[Case], scratch: Path) -> None:
    """Start the ranks and wait until they are through, or until no case ends for too long."""
    for case in cases:
        Path(case.output).mkdir(parents=True, exist_ok=True)
    plan = scratch / f"cases{world_size}.json"
    plan.write_bytes(json.dumps([asdict(c) for c in cases]).encode())
    program = ["-m", "r3train.verify.topology_worker", str(plan)]
    with torchrun(world_size, program, scratch / f"launch{world_size}.log") as process:
        _wait(process, cases)


@contextmanager
def torchrun(
    world_size: int, program: Sequence[str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program under torchrun, which writes to the end of a log and ends with the context."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--master-port", str(free_port("127.0.0.1"))]
    command += ["--nproc-per-node", str(world_size), *program]
    # Transformer Engine multiplies float32 in TF32, of ten bits, where cuBLAS is not told otherwise
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    with log.open("a", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """End a launch and all of its session, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, cases: Sequence[Case]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S + _CASE_TIMEOUT_S
    ended = 0
    while process.poll() is None:
        count = sum(_read_status(c) is not None for c in cases)
        if count > ended:
            ended, deadline = count, time.monotonic() + _CASE_TIMEOUT_S
        if time.monotonic() > deadline:
            return
        time.sleep(0.2)

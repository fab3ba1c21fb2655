"""Run verification jobs: one torchrun a world size, restarted behind a job that takes it down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from r3train.verify.jobs import Job
from r3train.verify.topologies import Topology

JOB_TIMEOUT_S = 240
_START_TIMEOUT_S = 240


@dataclass(frozen=True)
class JobStatus:
    """How a job ended: ``error`` is empty where all ranks came through."""

    error: str
    seconds: float


def run(
    jobs: Sequence[Job],
    scratch: Path,
    topologies: dict[str, Topology],
    report: Callable[[str], None],
) -> dict[str, JobStatus]:
    """Run every job and say how it ended, by job id; outputs are in each job's directory."""
    statuses: dict[str, JobStatus] = {}
    for world_size in sorted({topologies[j.topology].world_size for j in jobs}):
        waiting = [j for j in jobs if topologies[j.topology].world_size == world_size]
        while waiting:
            started = time.monotonic()
            _launch(world_size, waiting, scratch)
            done = 0
            for job in waiting:
                status = _read_status(job)
                if status is None:
                    break
                statuses[job.job_id] = status
                done += 1
            if done < len(waiting):
                # the launch ended inside this job: it is the verdict on it, the rest runs again
                victim = waiting[done]
                log = (scratch / f"launch{world_size}.log").read_text(errors="replace")
                (Path(victim.output) / "launch.log").write_text(log)
                last = [line for line in log.splitlines() if "Error" in line][-1:] or ["no output"]
                statuses[victim.job_id] = JobStatus(f"the launch ended: {last[0]}", 0.0)
                done += 1
            report(f"{done} jobs on {world_size} ranks in {time.monotonic() - started:.0f} s")
            waiting = waiting[done:]
    return statuses


def _read_status(job: Job) -> JobStatus | None:
    file = Path(job.output) / "status.json"
    return JobStatus(**json.loads(file.read_text())) if file.is_file() else None


def _launch(world_size: int, jobs: Sequence[Job], scratch: Path) -> None:
    """Start the ranks and wait until they are through, or until no job ends for too long."""
    for job in jobs:
        Path(job.output).mkdir(parents=True, exist_ok=True)
    plan = scratch / f"jobs{world_size}.json"
    plan.write_text(json.dumps([asdict(j) for j in jobs]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size), "-m", "r3train.verify.worker", str(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(scratch / f"launch{world_size}.log", "a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            _wait(process, jobs)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait(process: subprocess.Popen, jobs: Sequence[Job]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S + JOB_TIMEOUT_S
    ended = 0
    while process.poll() is None:
        count = sum(_read_status(j) is not None for j in jobs)
        if count > ended:
            ended, deadline = count, time.monotonic() + JOB_TIMEOUT_S
        if time.monotonic() > deadline:
            return
        time.sleep(0.2)

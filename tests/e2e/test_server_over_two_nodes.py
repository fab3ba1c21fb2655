"""A server of two tasks that stand for two nodes, each with an address of this machine's, and a job that trains with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from r3train.engine.server import free_port
from tests.e2e import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
NODES = ("127.0.0.1", "127.0.0.2")


@dataclass(frozen=True)
class Server:
    address: str
    log: Path  # of its first node
    tasks: list[subprocess.Popen]


@pytest.fixture(scope="module")
def server(tiny_flags, tmp_path_factory) -> Iterator[Server]:
    """The tasks of ``slurm/train_multi_node.sbatch`` with NODES_PER_SERVER=2, each by ``slurm/server.sh``."""
    directory = tmp_path_factory.mktemp("two_nodes")
    meet = f"{NODES[0]}:{free_port(NODES[0])}"
    environment = {
        **jobs.environment(),
        "R3TRAIN_ROOT": str(jobs.ROOT),
        "BIN": str(Path(sys.executable).parent),
        "NODES_PER_SERVER": str(len(NODES)),
        "SERVERS_MEET": meet,
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * len(NODES)),
    }
    tasks = []
    for task, name in enumerate(NODES):
        own = {"SLURM_PROCID": str(task), "SLURMD_NODENAME": name}
        flags = ["--log", str(directory / f"{task}.log"), "--config", "configs/tiny_cpu.toml"]
        flags += [*tiny_flags, jobs.R3_FLAGS[0], "--sglang-tp-size", str(len(NODES))]
        command = ["bash", "slurm/server.sh", str(directory), *flags]
        tasks.append(
            subprocess.Popen(
                command, cwd=jobs.ROOT, env=environment | own, stdin=subprocess.DEVNULL
            )
        )
    try:
        deadline = time.monotonic() + 400
        while not (address := directory / "0.addr").exists():
            logs = "\n".join(p.read_text()[-3000:] for p in sorted(directory.glob("*.log")))
            assert time.monotonic() < deadline, logs
            assert all(task.poll() is None for task in tasks), logs
            time.sleep(0.3)
        yield Server(address.read_text().strip(), directory / "0.log", tasks)
    finally:
        for task in tasks:
            task.send_signal(signal.SIGTERM)
        for task in tasks:
            task.wait(timeout=60)


def test_a_job_trains_with_it_and_the_ranks_of_both_nodes_get_its_weights(
    server, tiny_flags, tmp_path
):
    assert [p.name for p in server.log.parent.glob("*.addr")] == ["0.addr"]  # the first's alone
    flags = [*tiny_flags, *jobs.R3_FLAGS, "--num-rollout", "2", "--check-weight-update-equal"]
    job = jobs.run(tmp_path / "run", *flags, "--rollout-external-engine-addrs", server.address)
    assert job.code == 0, job.output[-6000:]
    metrics = job.metrics()
    assert [m["r3/passed"] for m in metrics] == [True, True]
    assert all(m["served/gap_max"] <= 1e-4 for m in metrics)
    follower = server.log.with_name("1.log").read_text()
    assert "world_size=3, " in follower and "rank=2, " in follower, follower[-3000:]


def test_the_tasks_of_its_other_nodes_end_with_the_first(server):
    first, second = server.tasks
    os.kill(first.pid, signal.SIGTERM)
    first.wait(timeout=60)
    assert second.wait(timeout=60) != 0

"""--route-stores over two nodes: two torchruns on loopback, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from r3train.engine.server import free_port
from tests.e2e import jobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

# the data-parallel groups are the nodes: ranks 0 and 1, led by rank 0, and ranks 2 and 3, led by rank 2
FLAGS = [
    *jobs.R3_FLAGS,
    *"--r3-mismatch-threshold 1 --route-stores --tensor-model-parallel-size 2".split(),
    *"--sequence-parallel --num-rollout 2".split(),
]
# all of 127.0.0.0/8 is this machine's; nothing but node 1's leader listens at this one
ADDRESS_OF_NODE_1 = "127.0.0.2"


@contextlib.contextmanager
def torchrun(run_dir: Path, node: int, port: int, *flags: str) -> Iterator[psutil.Popen]:
    """One node's two ranks; whatever is left of them is ended."""
    command = jobs.command(run_dir, *flags)
    at = command.index("--master-port")
    command[at : at + 2] = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command[at:at] = ["--nnodes", "2", "--node-rank", str(node)]
    job = jobs.start(command, run_dir.parent / f"node_{node}.txt", start_new_session=True)
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def run_two_nodes(
    run_dir: Path, *flags: str, host_of_node_1: str
) -> tuple[tuple[int, int], jobs.Job]:
    """The exit codes of both nodes, and the job with what both printed."""
    port = free_port("127.0.0.1")
    with (
        torchrun(run_dir, 0, port, *flags) as first,
        torchrun(run_dir, 1, port, *flags, "--route-store-host", host_of_node_1) as second,
    ):
        codes = first.wait(timeout=360), second.wait(timeout=60)
    text = "".join((run_dir.parent / f"node_{node}.txt").read_text() for node in range(2))
    return codes, jobs.Job(max(codes, key=abs), text, run_dir)


def test_leaders_on_two_nodes_exchange_routes_over_their_own_addresses(tmp_path, served_flags):
    flags = [*served_flags, *FLAGS]
    codes, job = run_two_nodes(tmp_path / "run", *flags, host_of_node_1=ADDRESS_OF_NODE_1)
    assert codes == (0, 0), job.output
    metrics = job.metrics()
    assert len(metrics) == 2 and all(m["r3/passed"] is True for m in metrics)
    assert all(m["perf/route_wire_bytes_rank0"] == 0 for m in metrics)
    assert sum(m["perf/route_store_fetched_bytes_max"] for m in metrics) > 0
    logs = (job.run_dir / "logs/rank_00000.log").read_text()
    assert f"http://{ADDRESS_OF_NODE_1}:" in logs and "http://127.0.0.1:" in logs


def test_a_leader_that_cannot_bind_its_address_is_named_on_all_nodes(tmp_path, served_flags):
    flags = [*served_flags, *FLAGS]
    codes, job = run_two_nodes(tmp_path / "run", *flags, host_of_node_1="203.0.113.1")
    assert 0 not in codes, job.output
    assert "rank 2 cannot bind 203.0.113.1" in " ".join(job.output.split())


def test_a_server_that_only_node_0_reaches_is_refused_before_it_starts(tmp_path, tiny_flags):
    codes, job = run_two_nodes(tmp_path / "run", *tiny_flags, *FLAGS, host_of_node_1="127.0.0.2")
    assert 0 not in codes, job.output
    text = " ".join(job.output.split())
    assert "sglang.host is '127.0.0.1'" in text and "starting SGLang" not in text

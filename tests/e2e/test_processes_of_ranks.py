"""Processes of ranks as torchrun starts them: their imports, threads and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from r3train.engine.server import free_port

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
# tests run with torch's threads held to one
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_rank_starts_without_the_tracker_that_megatrons_inference_imports():
    code = """
import sys
from r3train.cpu.device import prepare_device
prepare_device()
import r3train.launch.start.build_actor
print("wandb" in sys.modules)
import wandb
print(wandb.__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "wandb"], done


THREADS = """
import os
os.sched_getaffinity = lambda _: range(6)  # of a machine of six cores
from r3train.cpu.device import prepare_device
prepare_device()
import torch
# one write: the ranks share a pipe, and the pieces of print() come between one another
os.write(1, f"threads {torch.get_num_threads()}\\n".encode())
"""


@pytest.mark.parametrize("given, threads", [(None, "3"), ("1", "1")])
def test_ranks_share_the_cores_unless_the_user_says_how_many_threads_each_takes(
    given, threads, tmp_path
):
    (tmp_path / "rank.py").write_text(THREADS)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": given} if given else {})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port("127.0.0.1")), str(tmp_path / "rank.py")]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == 2 * ["threads", threads], done


ONE_RANK = """
from r3train.cpu.device import prepare_device
prepare_device()
import torch, torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as buffers
from torch.utils._python_dispatch import TorchDispatchMode

class Messages(TorchDispatchMode):
    count = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gradients = torch.arange(6.0)
elsewhere = torch.zeros(6)
for collective in (buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func):
    for output in (gradients[:], elsewhere):
        with Messages() as messages:
            collective(output, gradients, group=dist.group.WORLD, async_op=False)
        print(messages.count, output.tolist() == gradients.tolist())
"""


def test_gradients_of_one_rank_are_sent_to_nobody():
    command = [sys.executable, "-W", "ignore", "-c", ONE_RANK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == 2 * ["0", "True", "1", "True"], done


RANK = """
import os, pathlib, sys, time
from r3train.loop.stop import StopSignal

directory = pathlib.Path(sys.argv[1])
stop = StopSignal(60)
stop.begin()
(directory / "pid").write_text(f"{os.getpid()}\\n")
while stop.received is None:
    time.sleep(0.05)
time.sleep(1)  # it saves, and torchrun may pass a signal on
(directory / "saved").write_text(stop.received)
"""


def _rank_that_wrote(pid: Path, torchrun: subprocess.Popen) -> psutil.Process:
    """Wait for a rank that writes its process number to a file, in a line."""
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert torchrun.poll() is None
        time.sleep(0.05)
    return psutil.Process(int(pid.read_text()))


@pytest.mark.parametrize("how", ["torchrun is killed", "Ctrl-C"])
def test_a_rank_saves_and_ends_when_its_torchrun_is_killed_and_at_ctrl_c(how, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
    launcher += [str(free_port("127.0.0.1"))]
    torchrun = subprocess.Popen(
        [*launcher, str(tmp_path / "rank.py"), str(tmp_path)],
        env=ENVIRONMENT,
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    pid = tmp_path / "pid"
    try:
        rank = _rank_that_wrote(pid, torchrun)
        if how == "Ctrl-C":  # a terminal sends it to all processes of the group
            os.killpg(torchrun.pid, signal.SIGINT)
        else:
            torchrun.send_signal(signal.SIGKILL)
        psutil.wait_procs([rank], timeout=60)
        left = rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
        if left:
            rank.kill()
        assert not left
    finally:
        torchrun.kill()
        torchrun.wait()
    assert (tmp_path / "saved").read_text() == ("SIGINT" if how == "Ctrl-C" else "SIGTERM")


ORPHAN = """
import os, pathlib, sys, time

directory, parent = pathlib.Path(sys.argv[1]), os.getppid()
(directory / "pid").write_text(f"{os.getpid()}\\n")
while os.getppid() == parent:
    time.sleep(0.01)
from r3train.loop.stop import StopSignal  # as late as in a job, after its checks

StopSignal(60, parent).begin()
(directory / "lived").write_text("")
time.sleep(600)
"""


def test_a_rank_whose_torchrun_is_killed_before_it_has_anything_to_save_ends(tmp_path):
    """The kernel tells of no parent that has ended already."""
    (tmp_path / "rank.py").write_text(ORPHAN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
    launcher += [str(free_port("127.0.0.1")), str(tmp_path / "rank.py"), str(tmp_path)]
    torchrun = subprocess.Popen(launcher, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    try:
        rank = _rank_that_wrote(pid, torchrun)
    finally:
        torchrun.kill()
        torchrun.wait()
    _, left = psutil.wait_procs([rank], timeout=30)
    for process in left:
        process.kill()
    assert not left and not (tmp_path / "lived").exists()

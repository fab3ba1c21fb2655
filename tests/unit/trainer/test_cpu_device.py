"""The start of a rank on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.engine.server import free_port

ROOT = Path(__file__).resolve().parents[3]


def test_a_rank_starts_without_the_tracker_that_megatrons_inference_imports():
    code = """
import sys
from r3train.trainer.megatron.cpu_device import prepare_device
prepare_device()
import r3train.launch.actor
print("wandb" in sys.modules)
import wandb
print(wandb.__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "wandb"], done


RANK = """
import os
os.sched_getaffinity = lambda _: range(6)  # of a machine of six cores
from r3train.trainer.megatron.cpu_device import prepare_device
prepare_device()
import torch
print("threads", torch.get_num_threads(), flush=True)
"""


@pytest.mark.parametrize("given, threads", [(None, "3"), ("1", "1")])
def test_ranks_share_the_cores_unless_the_user_says_how_many_threads_each_takes(
    given, threads, tmp_path
):
    (tmp_path / "rank.py").write_text(RANK)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": given} if given else {})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port("127.0.0.1")), str(tmp_path / "rank.py")]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == 2 * ["threads", threads], done


ONE_RANK = """
from r3train.trainer.megatron.cpu_device import prepare_device
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

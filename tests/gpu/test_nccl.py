"""NCCL between the GPUs of this node.  With fewer than two GPUs these read *not run*, never passed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from r3train.engine.server import free_port

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"not run: two CUDA devices needed, {NUM_GPUS} here"),
]
_NUMBERS = 1 << 26  # 256 MiB


@pytest.mark.parametrize(
    "settings",
    [{}, {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}],
    ids=["as in a run", "NVLS"],
)
def test_a_sum_over_all_gpus_is_right_and_its_bandwidth_is_told(settings):
    port = str(free_port("127.0.0.1"))
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", port]
    command += ["--nproc-per-node", str(NUM_GPUS), __file__]
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def one_rank() -> None:
    """Join as production does, sum, and compare; rank 0 prints the bandwidth."""
    from r3train.cpu.device import prepare_device
    from r3train.loop.distribute import broadcast_json
    from r3train.trainer.megatron import topology

    device = prepare_device()
    topology.init_distributed("nccl", 5)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert broadcast_json({"rank": rank}) == {"rank": 0}
    numbers = torch.full((_NUMBERS,), float(rank), device=device)
    torch.distributed.all_reduce(numbers)
    assert (numbers == sum(range(size))).all()
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(10):
        torch.distributed.all_reduce(numbers)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / 10
    if rank == 0:
        rate = 2 * (size - 1) / size * numbers.nbytes / seconds / 1e9
        nvls = os.environ["NCCL_NVLS_ENABLE"]
        print(f"all-reduce over {size} GPUs: {rate:.0f} GB/s (NCCL_NVLS_ENABLE={nvls})")
    topology.shutdown()


if __name__ == "__main__":
    one_rank()

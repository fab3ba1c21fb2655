"""Threads of ranks whose Adam is on the host, where memory is said to be CUDA's, and of those on the device.

    torchrun -m tests.rehearsal.threads_of_host_adam REPORT MODEL

Each rank has the one thread that torchrun gives it, as on CUDA.  Writes REPORT.RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

os.sched_getaffinity = lambda _: range(6)  # of a machine of six cores

from r3train.cpu.device import prepare_device  # noqa: E402

prepare_device()

from r3train.host_group import join_ranks, leave_ranks  # noqa: E402
from tests.oracle.actors import actor_of, configuration  # noqa: E402
from tests.rehearsal.test_optimizer_offload import (  # noqa: E402
    OFFLOAD,
    SHARDED,
    build_as_on_cuda,
)

if __name__ == "__main__":
    report, model = map(Path, sys.argv[1:])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(str(report.with_suffix(".store")), ranks)
    join_ranks("gloo", store, rank, ranks, timeout=timedelta(minutes=1))
    build_as_on_cuda()
    found = {}
    for name, overrides in {"device": {}, "host": OFFLOAD}.items():
        torch.set_num_threads(1)
        with actor_of(configuration(model, **SHARDED, optimizer_overrides=overrides)):
            found[name] = torch.get_num_threads()
    leave_ranks()
    report.with_suffix(f".{rank}.json").write_text(json.dumps(found))

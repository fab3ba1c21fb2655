"""The ranks' two process groups: the default one for tensors of the device, one for the host's.

NCCL serves no tensor of the host.  So JSON, slices, totals and barriers go over a gloo group of all
ranks, and everything else over the default group.  The two are made on a CPU as well.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

_host_group: dist.ProcessGroup | None = None


def join_ranks(
    backend: str, store: dist.Store, rank: int, world_size: int, *, timeout: timedelta
) -> None:
    """Make the default group and the host group; a collective.

    backend: of the default group: gloo, nccl, or auto (nccl with CUDA).
    """
    global _host_group
    set_nccl_defaults(os.environ)
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _host_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="host messages")


def host_group() -> dist.ProcessGroup:
    """Return the group of all ranks that carries host tensors, after ``join_ranks``."""
    assert _host_group is not None, "join_ranks first"
    return _host_group


def host_barrier() -> None:
    """Wait for all ranks."""
    dist.barrier(group=host_group())


def leave_ranks() -> None:
    """Leave every process group."""
    global _host_group
    dist.destroy_process_group()
    _host_group = None


def set_nccl_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what NCCL needs before its first communicator, where the user has set nothing.

    SGLang turns cuMem allocations off where nothing is set, and in a weight group whose two sides
    differ NCCL fails.  Source: SGLang 0.5.23, ``_set_envs_and_config``; slime and miles do the same.
    """
    environment.setdefault("NCCL_CUMEM_ENABLE", "0")

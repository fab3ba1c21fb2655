"""The ranks' two process groups: the default one for tensors of the device, one for the host's.

NCCL serves no tensor of the host.  So JSON, slices, totals and barriers go over a gloo group of all
ranks, and everything else over the default group.  The two are made on a CPU as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from r3train.cuda_environment import set_nccl_defaults

_host_group: dist.ProcessGroup | None = None
beat_s = 5.0
_lost: RuntimeError | None = None  # on rank 0: the error of a beat that another rank did not answer
stop_here = stop_anywhere = False


def join_ranks(
    backend: str, store: dist.Store, rank: int, world_size: int, *, timeout: timedelta
) -> None:
    """Make the default group and the host group; a collective.

    backend: of the default group: gloo, nccl, or auto (nccl with CUDA).
    """
    global _host_group, beat_s, _lost, stop_here, stop_anywhere
    beat_s, _lost = min(5.0, timeout.total_seconds() / 4), None
    stop_here = stop_anywhere = False
    set_nccl_defaults(os.environ)
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _host_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="host messages")


def one_node(environ: Mapping[str, str]) -> bool:
    """True if torchrun runs all ranks on this node."""
    return environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")


def host_group() -> dist.ProcessGroup:
    """Return the group of all ranks that carries host tensors, after ``join_ranks``."""
    assert _host_group is not None, "join_ranks first"
    return _host_group


def host_barrier() -> None:
    """Wait for all ranks."""
    dist.barrier(group=host_group())


@contextmanager
def rank_zero_alone() -> Iterator[None]:
    """Let rank 0 work in the block for as long as that takes; a collective.

    The other ranks leave their block empty and wait at its end.  Every few seconds all ranks tell one
    another that they are there, on rank 0 by a thread.  So the group's time-out is one of silence: a
    rank that is dead or frozen is an error on the others within it, whatever rank 0 waits for.  Inside
    the block rank 0 makes no other collective of the host group.  After an error of rank 0's the others
    wait until it leaves the group.
    """
    if dist.get_world_size() == 1:
        yield
        return
    if dist.get_rank() != 0:
        yield
        while _beat(1):
            pass
        return
    done = threading.Event()

    def beats() -> None:
        global _lost
        try:
            while not done.wait(beat_s):
                _beat(1)
        except RuntimeError as error:
            _lost = error

    thread = threading.Thread(target=beats, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    require_ranks()
    _beat(0)


def _beat(works: int) -> bool:
    """True if rank 0 works still; a collective, which also carries ``note_stop`` to all ranks."""
    global stop_anywhere
    flags = torch.tensor([1 - works, stop_here], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=host_group())
    ended, stop = flags.tolist()
    stop_anywhere = stop_anywhere or bool(stop)
    return not ended


def note_stop() -> None:
    """Note on any rank that the run was told to stop; rank 0's waits heed it within a beat."""
    global stop_here
    stop_here = True


def stop_noted() -> bool:
    """True on all ranks once one has called ``note_stop`` before a beat."""
    return stop_anywhere


def require_ranks() -> None:
    """Raise RuntimeError on rank 0 if a rank was silent for too long, for waits inside the block."""
    if _lost is not None:
        raise RuntimeError(f"another rank does not answer rank 0: {_lost}") from _lost


def leave_ranks() -> None:
    """Leave every process group."""
    global _host_group
    dist.destroy_process_group()
    _host_group = None

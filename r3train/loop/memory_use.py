"""The memory that a step took, for the metrics."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from r3train.host_group import host_group

_GB = 1e9


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return ``perf/gpu_memory_peak_gb`` and ``perf/host_memory_gb``, in GB of 10^9 bytes; a collective.

    The first, with CUDA only, is torch's peak since the last call on the rank with the largest; the
    second what the fullest of the ranks' machines has in use, whoever uses it.
    """
    machine = psutil.virtual_memory()
    used = torch.tensor([0.0, float(machine.total - machine.available)], dtype=torch.float64)
    if device.type == "cuda":
        used[0] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=host_group())
    gpu, host = (used / _GB).tolist()
    gpu_metrics = {"perf/gpu_memory_peak_gb": gpu} if device.type == "cuda" else {}
    return gpu_metrics | {"perf/host_memory_gb": host}

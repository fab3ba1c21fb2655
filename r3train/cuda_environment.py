"""CUDA without torch: the devices that are visible, and what ranks and servers set in their environment.

Nothing here imports torch where no driver is: a dry run on a login node answers at once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import MutableMapping

# What NCCL needs before its first communicator, on both sides of a weight group.  SGLang turns cuMem
# allocations and NVLink SHARP off where nothing is set, and in a group whose two sides differ NCCL fails.
# Source: SGLang 0.5.23, ``_set_envs_and_config``; slime and miles do the same.
NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# A rank's own.  With one hardware queue Megatron's collectives start before the kernels that they are to
# overlap with; packs of unequal length leave holes in segments of fixed size.
RANK_DEFAULTS = {
    **NCCL_DEFAULTS,
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # two names of one setting


def set_nccl_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what NCCL needs where the user has set nothing."""
    for name, value in NCCL_DEFAULTS.items():
        environment.setdefault(name, value)


def set_rank_defaults(environment: MutableMapping[str, str]) -> None:
    """Set what a rank on CUDA needs, before its first use of the device, where the user has set nothing."""
    for name, value in RANK_DEFAULTS.items():
        if not (name in _ALLOCATOR and any(other in environment for other in _ALLOCATOR)):
            environment.setdefault(name, value)


def visible_gpus() -> int:
    """Return the number of CUDA devices that torch sees; without a driver torch is not imported."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0

"""CUDA without torch: the devices that are visible, and what ranks and servers set in their environment.

Nothing here imports torch where no driver is: a dry run on a login node answers at once.  The guard of a
server imports it too.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# What NCCL needs before its first communicator, on both sides of a weight group.  SGLang turns cuMem
# allocations and NVLink SHARP off where nothing is set, and in a group whose two sides differ NCCL fails.
# Source: SGLang 0.5.23, ``_set_envs_and_config``; slime and miles do the same.
NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# A rank's own.  With one hardware queue Megatron's collectives start before the kernels that they are to
# overlap with; packs of unequal length leave holes in segments of fixed size.  Where tilelang is, which SGLang needs,
# flash-linear-attention would take another kernel than the one that was compared for a part of the backward pass.
RANK_DEFAULTS = {
    **NCCL_DEFAULTS,
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "FLA_TILELANG": "0",
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


def set_kernel_cache(environment: MutableMapping[str, str], private: str | None) -> None:
    """Set where torch keeps compiled kernels, which a process loads as code, where the user has not.

    torch's own place is a known name in the temporary directory, where another user can make it first.
    private: a directory that serves where no lasting one is safe; None: one is made for this process.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in environment:
        cache = kernel_cache(environment) or private
        if cache is None:
            cache = tempfile.mkdtemp(prefix="r3train-kernels-")
            atexit.register(shutil.rmtree, cache, ignore_errors=True)
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
    # torch leaves its precompiled headers (150 MB) outside of that cache, under the known name, and looks
    # for them also where every kernel is in the cache: each server would compile them anew.
    environment.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def kernel_cache(environment: Mapping[str, str]) -> str | None:
    """Make and return a lasting directory that this user alone can write, or None.

    It is ``r3train/torchinductor`` in XDG_CACHE_HOME or ``~/.cache``, else ``r3train-UID/torchinductor``
    in the temporary directory.
    """
    given = environment.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    temporary = Path(tempfile.gettempdir()) / f"r3train-{os.getuid()}"
    for parent in (home / "r3train", temporary):
        cache = parent / "torchinductor"
        try:
            parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for each in (parent, cache):
                each.mkdir(mode=0o700, exist_ok=True)
            if _keeps_names(parent.parent) and all(map(_is_ours_alone, (parent, cache))):
                return str(cache)
        except OSError:  # no home, or a read-only one
            continue
    return None


def _keeps_names(directory: Path) -> bool:
    """False where everybody may rename what is in a directory."""
    mode = directory.stat().st_mode
    return not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)


def _is_ours_alone(directory: Path) -> bool:
    """True for a directory, no link to one, that is this user's and that no other can write."""
    found = os.lstat(directory)
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not writable_by_others


def visible_gpus() -> int:
    """Return the number of CUDA devices that torch sees; without a driver torch is not imported."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0

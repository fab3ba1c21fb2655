"""Unmodified megatron-core on a CPU with gloo.

``prepare_device()`` must run before the first ``import megatron.core``.  With CUDA it gives this rank
its device.  Without CUDA it replaces the few CUDA calls of megatron-core 0.19.2 by CPU equivalents.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from r3train.cpu import products
from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.cuda_environment import set_kernel_cache, set_rank_defaults
from r3train.patches import megatron_without_cuda, patched, stand_in, torch_without_cuda
from r3train.patches import without_module

_installed = False

# Kernels of SGLang that Megatron imports where they are, under ``except ImportError`` alone.  sgl-deep-ep asserts at its
# import, on CUDA only, that the host has one NCCL and a toolkit; no rank needs one of them.
_KERNELS_OF_SERVERS = ("deep_ep", "flashinfer", "flash_mla", "flash_attn.cute")


def prepare_device(*, uses_deep_ep: bool = False) -> torch.device:
    """Return the device of this rank; without CUDA, adapt megatron-core first.

    It may be called again.  Returns ``cuda:LOCAL_RANK``, which is then the current device, or ``cpu``.
    It sets where kernels are kept, and on CUDA a rank's environment first (``cuda_environment``), and lets
    transformers be imported (``torchvision_stub``).  On CUDA the kernels of servers cannot be imported then; uses_deep_ep:
    DeepEP can, as the flex dispatcher needs it.
    Without torchrun's LOCAL_RANK it is ``cuda:0``.
    """
    set_kernel_cache(os.environ, None)
    declare_ops_for_imports()
    if torch.cuda.is_available():
        set_rank_defaults(os.environ)
        for name in _KERNELS_OF_SERVERS:
            if name not in sys.modules and not (uses_deep_ep and name == "deep_ep"):
                stand_in(name, None, "Megatron imports it where it is, and no rank needs it")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    global _installed
    if not _installed:
        assert (
            "megatron.core" not in sys.modules
        ), "megatron.core was imported before prepare_device()"
        _installed = True
        threads = threads_per_rank(os.environ)
        if threads is not None:
            torch.set_num_threads(threads)
        with warnings.catch_warnings():
            # at import, megatron-core warns that a CPU machine lacks apex and Transformer Engine
            warnings.simplefilter("ignore")
            _install()
    return torch.device("cpu")


def threads_per_rank(environ: Mapping[str, str]) -> int | None:
    """A rank's share of the cores; None for a single rank, and where the user has set OMP_NUM_THREADS.

    torchrun sets it to 1 for several ranks on whatever machine; what it was started with shows who did.
    """
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # no Linux
        return None
    if ranks == 1 or any(entry.startswith(b"OMP_NUM_THREADS=") for entry in given):
        return None
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def uses_transformer_engine(attention_backend: str, *, on_cuda: bool) -> bool:
    """Return True if the actor is built of Transformer Engine's layers.

    The local layers are for a CPU: on CUDA their attention and their router fail.
    Raises ValueError where the asked layers are not to be had on this device.
    """
    if attention_backend == "local" or (attention_backend == "auto" and not on_cuda):
        if on_cuda:
            raise ValueError(
                "--attention-backend local: these layers run on a CPU only, and a CUDA device is"
                " here; take te, or hide the device (CUDA_VISIBLE_DEVICES=)"
            )
        return False
    try:
        # its core installs without the part for torch, and that part without its compiled library
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a broken build raises whatever its loader does
        where = " on a CUDA device" if on_cuda else ""
        raise ValueError(
            f"--attention-backend {attention_backend}{where} needs transformer_engine.pytorch, which"
            f" does not import ({type(error).__name__}: {error}); r3train docs installation says how to install it"
        ) from error
    return True


def _install() -> None:
    # The rule table of dynamo must be built from the real torch.cuda (torch.optim imports it).
    import torch._dynamo  # noqa: F401

    torch_without_cuda.install()
    with (
        patched(
            torch,
            "compile",
            lambda f=None, **_: f if f is not None else (lambda g: g),
            expects="(model=None, ...)",
            why="megatron.core.jit binds it at import: slow, and it needs a C++ compiler",
        ),
        without_module("wandb", "Megatron imports it for logs of its own, which takes long"),
    ):
        import megatron.core  # noqa: F401
    megatron_without_cuda.install()
    products.install()

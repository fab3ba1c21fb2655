"""SGLang's out-of-tree platform for machines without CUDA: plain torch on the CPU.

SGLang loads ``activate`` through the entry point group ``sglang.srt.platforms`` in every process
it starts, before torchvision is imported.  With CUDA the platform is not active, nor in a server that
somebody else has started where SGLang's own kernels are installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from r3train.cpu.torchvision_stub import declare_torchvision_ops

# set by launch_server; its workers are forks of it
in_our_server = False


def activate() -> str | None:
    """Return the qualified name of the CPU platform class, or None if the platform is not for this process.

    Without ``sgl_kernel`` SGLang serves on no CPU, so that others' servers lose nothing by ours.
    Source: ``sglang.srt.platforms``: a plugin that returns None is not active.
    """
    if torch.cuda.is_available():
        return None
    if not in_our_server and find_spec("sgl_kernel") is not None:
        return None
    declare_torchvision_ops()
    return "r3train.cpu.platform_class.TorchCpuPlatform"

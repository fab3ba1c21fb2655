"""SGLang's out-of-tree platform for machines without CUDA: plain torch on the CPU.

SGLang loads ``activate`` through the entry point group ``sglang.srt.platforms`` in every process
it starts, before torchvision is imported.  With CUDA the platform is not active.
"""

from __future__ import annotations

import torch

from r3train.torchvision_stub import declare_torchvision_ops

declare_torchvision_ops()


def activate() -> str | None:
    """Return the qualified name of the CPU platform class, or None if torch has CUDA.

    Source: ``sglang.srt.platforms``: a plugin that returns None is not active.
    """
    if torch.cuda.is_available():
        return None
    return "r3train.engine.cpu_platform_class.TorchCpuPlatform"

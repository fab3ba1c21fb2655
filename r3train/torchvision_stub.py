"""Let transformers be imported next to a CPU-only torch.

PyPI's torchvision is a CUDA build: its extension cannot load beside torch+cpu, so the two ops that
torchvision's import registers fake kernels for are never defined and the import raises.
"""

from __future__ import annotations

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_torchvision_ops() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms``, once, where torch has no CUDA.

    torch calls it at the end of its import where r3train is installed (entry point
    ``torch.backends``), so that a user's own script imports transformers too; our code calls it before
    anything imports transformers or torchvision.  The schema is enough: nothing here calls the ops.  It
    is safe to call again, and does nothing with a CUDA build of torch.
    """
    import torch

    if torch.version.cuda is not None:
        return
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", _SCHEMA)

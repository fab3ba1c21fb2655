"""Let transformers be imported next to a CPU-only torch, in our own processes only.

PyPI's torchvision is a CUDA build: its extension cannot load next to torch+cpu, so the two ops that
torchvision's import registers fake kernels for are never defined and the import raises.  Programs of others
in this environment import torch without us.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from r3train.patches import note

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_torchvision_ops() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms``, once, where torchvision cannot define them.

    Our code calls it before anything imports transformers or torchvision.  The schema is enough: nothing
    here calls the ops.  It is safe to call again, and does nothing with a CUDA build of torch, nor where
    torchvision's own extension loads (a CPU build of it): that would define the ops a second time, which
    ends the process.
    """
    import torch

    if torch.version.cuda is not None or _own_extension_loads():
        return
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", _SCHEMA)


def _own_extension_loads() -> bool:
    """True if torchvision's extension is loaded now, as torchvision's import would; it is not imported."""
    import torch

    if "torchvision.ops" in sys.modules:  # its import went well
        return True
    found = PathFinder.find_spec("torchvision")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        for library in sorted(Path(place).glob("_C*.so")):
            try:
                torch.ops.load_library(library)
                return True
            except OSError:  # of another build of torch
                continue
    return False


def declare_ops_for_imports() -> None:
    """Have ``declare_torchvision_ops`` called as soon as anything in this process imports torchvision.

    For the entry points of processes that run code of the user, which may import transformers; torch is
    not imported before.
    """
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        note(
            "sys.meta_path",
            "torchvision's build for CUDA cannot be imported next to torch's for a CPU",
        )
        sys.meta_path.insert(0, _BeforeTorchvision())


class _BeforeTorchvision(MetaPathFinder):
    """Finds torchvision; the ops are declared as it is imported, and not where somebody asks if it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torchvision as Python would, with a loader that declares the ops first; no other module."""
        found = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if found is not None and found.loader is not None:
            run = found.loader.exec_module

            def declare_and_run(module: ModuleType) -> None:
                declare_torchvision_ops()
                run(module)

            found.loader.exec_module = declare_and_run
        return found

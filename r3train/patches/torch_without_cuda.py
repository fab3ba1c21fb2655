"""torch.cuda, moves and factories for programs that ask for a CUDA device where none is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from r3train.patches import BUILTIN, patch

_WHY = "Megatron asks for a CUDA device whatever there is"


class _Stream:
    """A stand-in for a CUDA stream: everything on a CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    """A stand-in for a CUDA event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    """Replace them all; ``torch._dynamo`` must have been imported, whose table of rules needs torch's own."""
    _patch_cuda_namespace()
    _patch_tensor_moves()
    _patch_factories()


def _patch_cuda_namespace() -> None:
    """Replace torch.cuda.current_device() and the streams of alltoall dispatcher, PP and DDP."""
    cpu, stream = torch.device("cpu"), _Stream()
    # the "CUDA" generator is the default CPU generator
    get_state = torch.get_rng_state
    replaced = {
        "current_device": (lambda: cpu, "()"),
        "synchronize": (lambda *_, **__: None, "(device=None)"),
        "Stream": (_Stream, "(device=None, priority=0, **kwargs)"),
        "current_stream": (lambda *_, **__: stream, "(device=None)"),
        "stream": (lambda _: contextlib.nullcontext(), "(stream)"),
        "manual_seed": (torch.manual_seed, "(seed)"),
        "get_rng_state": (lambda *_, **__: get_state(), "(device='cuda')"),
    }
    for name, (replacement, expects) in replaced.items():
        patch(torch.cuda, name, replacement, expects=expects, why=_WHY)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _patch_tensor_moves() -> None:
    """Replace .cuda(), .to("cuda"), and type(), which optimizers compare with CUDA's names."""
    cpu = torch.device("cpu")
    real_to, real_type = torch.Tensor.to, torch.Tensor.type

    def cuda(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(cpu if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = cpu
        return real_to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real_type(self, *args, **kwargs)
        if not args and not kwargs and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    patch(torch.Tensor, "cuda", cuda, expects=BUILTIN, why=_WHY)
    patch(torch.Tensor, "to", to, expects=BUILTIN, why=_WHY)
    why = "Megatron's optimizers take parameters of CUDA's types only"
    patch(torch.Tensor, "type", tensor_type, expects=BUILTIN, why=why)


def _patch_factories() -> None:
    """Ignore device="cuda" and pinned memory in torch.zeros and its like."""
    from torch.utils._device import _device_constructors

    # Fill its cache with the real factories: `with torch.device("meta")` (HF's from_pretrained)
    # otherwise breaks silently.
    _device_constructors()

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in ("zeros", "empty", "tensor"):
        patch(torch, name, on_cpu(getattr(torch, name)), expects=BUILTIN, why=_WHY)

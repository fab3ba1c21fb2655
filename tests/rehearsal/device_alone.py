"""``train_async.py`` on a stand-in for CUDA: every group but gloo's own serves the device only.

    torchrun -m tests.rehearsal.device_alone REPORT [flags of train_async.py]

The stand-in is memory of the CPU, of which the mode below keeps account: what is asked for on
"cuda", or on ``cpu:0`` (the device that the actor gets), lies on the device, and so does what is
computed from it.  A collective over the group that would be NCCL's refuses every tensor that does
not, in our code, Megatron's and torch's.  Writes to REPORT.RANK.json what was sent where.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from r3train.cpu import device as cpu_device
from r3train.launch.job import limits
from train_async import main

DEVICE = torch.device("cpu", 0)
FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")
# NCCL's barrier needs no tensor of the caller
WITHOUT_TENSORS = ("barrier",)


def on_device(place: Any) -> bool:
    """True for the places that stand for the device: cuda, and ``cpu`` with an index."""
    if isinstance(place, str):
        return place.startswith("cuda")
    return isinstance(place, torch.device) and (place.type == "cuda" or place.index is not None)


def storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage()._cdata


class DeviceAlone(TorchDispatchMode):
    """The account of the storages on the device, and the gate before every collective."""

    def __init__(self) -> None:
        super().__init__()
        self._device: dict[int, torch.UntypedStorage] = {}  # held: an address is not used twice
        self.host_groups: set[str] = set()
        self.sent: Counter[str] = Counter()

    def holds(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) in self._device

    def put(self, tensor: torch.Tensor) -> None:
        self._device[storage(tensor)] = tensor.untyped_storage()

    def take(self, tensor: torch.Tensor) -> None:
        self._device.pop(storage(tensor), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.namespace == "c10d":
            self._check(func.name(), args, tensors)
        out = func(*args, **(kwargs or {}))
        if any(self.holds(t) for t in tensors):
            host = {storage(t) for t in tensors if not self.holds(t)}
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and storage(t) not in host:
                    self.put(t)
        return out

    def _check(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        boxes = [a for a in args if isinstance(a, torch.ScriptObject)]
        (box,) = (b for b in boxes if str(b._type()).endswith(".c10d.ProcessGroup"))
        on_host = dist.ProcessGroup.unbox(box).group_name in self.host_groups
        self.sent["host" if on_host else "device"] += 1
        if name.removeprefix("c10d::").rstrip("_") in WITHOUT_TENSORS:
            return
        for t in tensors:
            if self.holds(t) == on_host:
                kind = "cpu" if not on_host else "cuda"
                raise RuntimeError(f"{name}: No backend type associated with device type {kind}")


def install(mode: DeviceAlone) -> None:
    """Let torch place tensors on the stand-in device, and let groups be NCCL's unless gloo is named."""
    cpu_device.prepare_device()
    cpu_device.prepare_device = lambda **_: DEVICE
    limits.device_lacks = lambda config: iter(())  # the device is there, though none is visible
    torch.cuda.current_device = lambda: DEVICE
    Tensor = torch.Tensor
    to, numpy, device = Tensor.to, Tensor.numpy, Tensor.device

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = [p for p in (*args, kwargs.get("device")) if isinstance(p, (str, torch.device))]
        there = on_device(places[0]) if places else mode.holds(self)
        out = to(self, *args, **kwargs)
        if mode.holds(out) != there:  # another place is another memory
            out = out.clone() if storage(out) == storage(self) else out
            (mode.put if there else mode.take)(out)
        return out

    def as_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if mode.holds(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return numpy(self, *args, **kwargs)

    Tensor.to, Tensor.numpy = moved, as_numpy
    Tensor.device = property(lambda self: DEVICE if mode.holds(self) else device.__get__(self))
    Tensor.cuda = lambda self, *_, **__: moved(self, DEVICE)
    Tensor.cpu = lambda self, *_, **__: moved(self, "cpu")
    torch.nn.Module.cuda = lambda self, *_, **__: self.to(DEVICE)

    # it moves the tensors of CUDA alone, and the CPU adaptation takes what is left for the host's
    from megatron.core.transformer.moe import token_dispatcher

    to_host = token_dispatcher.maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = lambda value, *how, **more: to_host(
        value.to("cpu", non_blocking=True) if torch.is_tensor(value) else value, *how, **more
    )

    def placing(factory: Any) -> Any:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = factory(*args, **kwargs)
            if on_device(kwargs.get("device")):
                mode.put(out)
            return out

        return make

    for name in FACTORIES:
        setattr(torch, name, placing(getattr(torch, name)))

    join, new_group = dist.init_process_group, dist.new_group

    def join_nccl(backend: str, **where: Any) -> None:
        assert backend == "nccl", backend
        join("gloo", **where)

    def make_group(*args: Any, backend: str | None = None, **facts: Any) -> dist.ProcessGroup:
        group = new_group(*args, backend="gloo", **facts)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):  # this rank is of it
            mode.host_groups.add(group.group_name)
        return group

    dist.init_process_group, dist.new_group = join_nccl, make_group
    c10d = dist.distributed_c10d
    original = c10d._get_object_coll_device

    def object_device(group: Any = None) -> Any:
        on_host = group is not None and group.group_name in mode.host_groups
        return original(group) if on_host else DEVICE

    c10d._get_object_coll_device = object_device


if __name__ == "__main__":
    report = Path(sys.argv.pop(1))
    mode = DeviceAlone()
    install(mode)
    try:
        with mode:
            main()
    finally:
        found = {"sent": dict(mode.sent), "host_groups": len(mode.host_groups)}
        report.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))

"""A rank's weights, gradients and optimizer state, which leave the device while servers use it (--colocate).

Storages are emptied and filled again in place, so every view of them, and there are many in Megatron, stays as
it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import torch
from megatron.core.optimizer import MegatronOptimizer

logger = logging.getLogger(__name__)

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host: one of CUDA to pinned memory, which is several times as fast both ways."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


class DeviceMemory:
    """The large tensors of a rank: parameters, gradient buffers, moments and main weights.

    What lies on the host anyway (optimizer_cpu_offload) stays there.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer, device: torch.device
    ):
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        # of each part that is away: its storages, their bytes and their copies on the host
        self._released: dict[Part, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}

    def hold(self, *parts: Part) -> None:
        """Hold these parts on the device and no other; gradients come back as zeros."""
        if "gradients" not in parts:
            self._optimizer.zero_grad()  # lets go of copies that it made of them
        for part in PARTS:
            if part not in parts and part not in self._released:
                self._released[part] = [self._send(s, part) for s in self._storages(part)]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # to the device, for the servers
        for part in parts:
            for storage, num_bytes, copy in self._released.pop(part, ()):
                storage.resize_(num_bytes)
                restored = _bytes_of(storage)
                restored.zero_() if copy is None else restored.copy_(copy)

        logger.info("the actor holds %s", ", ".join(parts) or "nothing")

    @property
    def is_whole(self) -> bool:
        """True when every part is on the device."""
        return not self._released

    def num_bytes(self) -> int:
        """Bytes that all parts hold on the device now."""
        return sum(s.nbytes() for part in PARTS for s in self._storages(part))

    def _send(
        self, storage: torch.UntypedStorage, part: Part
    ) -> tuple[torch.UntypedStorage, int, torch.Tensor | None]:
        num_bytes, copy = storage.nbytes(), None
        if part != "gradients":
            copy = on_host(_bytes_of(storage))
        storage.resize_(0)
        return storage, num_bytes, copy

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """The part's storages, each once; weights that the optimizer shares are no part of its state."""
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors(part)}
        if part == "optimizer":
            for shared in ("weights", "gradients"):
                for tensor in self._tensors(shared):
                    found.pop(tensor.untyped_storage()._cdata, None)
        return [s for s in found.values() if s.device.type == self._device.type]

    def _tensors(self, part: Part) -> Iterator[torch.Tensor]:
        if part == "optimizer":
            yield from _tensors_of(self._optimizer)
            return
        for p in (p for chunk in self._chunks for p in chunk.parameters()):
            if part == "weights":
                yield p.data
            elif getattr(p, "main_grad", None) is not None:
                yield p.main_grad


def _tensors_of(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters and the state of the optimizers that Megatron wraps."""
    inner = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
    while inner:
        each = inner.pop()
        inner += getattr(each, "sub_optimizers", ())  # with state on the host
        for group in each.param_groups:
            yield from (p.data for p in group["params"])
        for state in each.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

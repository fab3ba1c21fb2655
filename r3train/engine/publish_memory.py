"""The shared-memory transport: one checkpoint in memory, over which every version is written.

Its files have no name but that of their writer's descriptors, so they end with it however it ends, and
no limit of /dev/shm holds for them.  Servers must be on this node and of this user.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from r3train.families import has_fused_experts
from r3train.engine.control import EngineControl
from r3train.engine.publish import Published, WeightPublisher, buckets
from r3train.hf_checkpoint import SAFETENSORS_DTYPES, NamedTensors, TensorKind, kind_of
from r3train.hf_checkpoint import copy_all_but_weights

logger = logging.getLogger(__name__)

_ALIGNED = 64


class SharedMemoryPublisher(WeightPublisher):
    """Write every version into the same memory, and let every server load it as a checkpoint.

    ``directory`` gets links to the memory and the other files of ``hf_checkpoint``.  A server maps what it
    loads, and copies it into its own tensors before it answers.  With CUDA the memory is registered: other
    memory is copied to by way of a buffer that one core empties.

    Several ranks may write, each its own tensors: ``gather`` returns what every rank gives to it, and those
    other than 0 have no ``engine``.
    """

    overwrites = True

    def __init__(
        self,
        engine: EngineControl | None,
        *,
        directory: str | Path,
        hf_checkpoint: str | Path,
        bucket_bytes: int,
        flush_cache: bool = True,
        gather: Callable[[Any], list[Any]] = lambda part: [part],
    ) -> None:
        self._engine = engine
        self.directory = Path(directory).resolve()
        self._fused_experts = has_fused_experts(Path(hf_checkpoint))
        self._bucket_bytes = bucket_bytes
        self._flush_cache = flush_cache
        self._gather, self._gathered = gather, False
        self._version: int | None = None  # of the memory, once servers hold it
        self._files: list[_MemoryFile] = []
        self._registers = torch.cuda.is_available()
        if engine is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in self.directory.glob("*.safetensors"):
                stale.unlink()  # a killed job's: its memory went with it
            copy_all_but_weights(Path(hf_checkpoint), self.directory)

    def give(self, server: int) -> int | None:
        """Let a server that joins load what the memory holds."""
        if self._version is not None:
            self._engine.update_weights_from_disk(
                str(self.directory), weight_version=self._version, server=server
            )
        return self._version

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Write one version over the last one, and let every server load what all ranks have written.

        Raises EngineError from the engine and ValueError for a fused expert name, no tensor, or one that two
        ranks have written.
        """
        began, self._version = time.monotonic(), None
        sent: dict[str, TensorKind] = {}
        num_bytes = num_buckets = 0
        grouped = buckets(named_tensors, self._bucket_bytes, fused_experts=self._fused_experts)
        for bucket in grouped:
            if num_buckets == len(self._files):
                self._files.append(_MemoryFile(self.directory))
            self._registers = self._files[num_buckets].write(bucket, registers=self._registers)
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            sent |= {name: kind_of(tensor) for name, tensor in bucket}
            num_buckets += 1
        while len(self._files) > num_buckets:
            self._files.pop().close()
        local = Published(version, sent, num_bytes, num_buckets, time.monotonic() - began)
        logger.info(
            "weight update %d: %d bytes written in %.2f s", version, num_bytes, local.seconds
        )
        parts, self._gathered = self._gather(asdict(local)), True
        if self._engine is None:
            return local
        for part in (msgspec.convert(part, Published) for part in parts[1:]):
            if twice := sent.keys() & part.sent.keys():
                raise ValueError(f"weight update {version}: two ranks have written {min(twice)}")
            sent |= part.sent
            num_bytes += part.num_bytes
            num_buckets += part.num_buckets
        if not sent:
            raise ValueError("there was no weight to publish")
        self._engine.update_weights_from_disk(
            str(self.directory), weight_version=version, flush_cache=self._flush_cache
        )
        self._version = version
        self._gathered = False
        return Published(version, sent, num_bytes, num_buckets, time.monotonic() - began)

    def abandon(self) -> None:
        """Let the other ranks go on, which have written their tensors for nothing."""
        if not self._gathered:
            self._gather(None)
        self._gathered = False

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        while self._files:
            self._files.pop().close()


class _MemoryFile:
    """A safetensors file in memory that nobody else has a name for; a link in ``directory`` leads to it while it is open."""

    def __init__(self, directory: Path) -> None:
        self._file = os.memfd_create("r3train-weights")
        self._link = directory / f"model-{os.getpid()}-{self._file}.safetensors"
        self._link.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
        self._kinds: list[tuple[str, TensorKind]] = []
        self._places: list[torch.Tensor] = []
        self._registered: int | None = None  # the address of memory that CUDA knows

    def write(self, bucket: Sequence[tuple[str, torch.Tensor]], *, registers: bool) -> bool:
        """Write tensors of one dtype; the file is laid out anew only where names or kinds have changed.

        registers: new memory is registered with CUDA.  Returns it, or False once CUDA has refused.
        """
        kinds = [(name, kind_of(tensor)) for name, tensor in bucket]
        if kinds != self._kinds:
            self._drop_memory()
            self._places = self._laid_out(kinds)
            self._kinds = kinds
            registers = registers and self._register(bucket[0][1].device)
        for (_, tensor), place in zip(bucket, self._places, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        if bucket[0][1].is_cuda:
            torch.cuda.current_stream().synchronize()
        return registers

    def _register(self, device: torch.device) -> bool:
        memory = self._places[0].untyped_storage()  # all of the file
        address = memory.data_ptr()
        if error := int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes(), 0)):
            logger.warning(
                "CUDA error %d: weights are copied into memory that is not pinned", error
            )
            with suppress(RuntimeError):  # CUDA keeps the error for the next launch of a kernel
                torch.ones(1, device=device)
            return False
        self._registered = address
        return True

    def _drop_memory(self) -> None:
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
        self._registered, self._places, self._kinds = None, [], []

    def _laid_out(self, kinds: list[tuple[str, TensorKind]]) -> list[torch.Tensor]:
        """Write the header; returns a view of the file for each tensor.

        No limit of a file system holds for it: where memory runs out, the kernel ends a process.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, kind in kinds:
            begin, end = end, end + kind.num_bytes
            dtype = SAFETENSORS_DTYPES[kind.dtype]
            header[name] = dict(dtype=dtype, shape=list(kind.shape), data_offsets=[begin, end])
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNED)
        first = 8 + len(text)
        os.ftruncate(self._file, 0)
        os.posix_fallocate(self._file, 0, first + end)
        os.pwrite(self._file, len(text).to_bytes(8, "little") + text, 0)
        memory = torch.frombuffer(mmap.mmap(self._file, first + end), dtype=torch.uint8)
        sizes = [kind.num_bytes for _, kind in kinds]
        return [
            part.view(getattr(torch, kind.dtype)).view(kind.shape)
            for (_, kind), part in zip(kinds, memory[first:].split(sizes), strict=True)
        ]

    def close(self) -> None:
        self._drop_memory()
        self._link.unlink(missing_ok=True)
        os.close(self._file)

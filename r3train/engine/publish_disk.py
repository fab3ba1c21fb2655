"""The disk transport: a checkpoint of each version, which every server loads by itself.

Needs a directory that the trainer and all servers see under the same path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from r3train.engine.control import EngineControl
from r3train.engine.publish import NamedTensors, Published, check_name

_VERSION_DIR = re.compile(r"v\d{6,}")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class DiskPublisher:
    """Write ``directory/v<version>`` atomically and have every server load it.

    Configuration and tokenizer files come from ``hf_checkpoint``.  Only the newest version stays.
    """

    def __init__(
        self,
        engine: EngineControl,
        *,
        directory: str | Path,
        hf_checkpoint: str | Path,
        bucket_bytes: int,
        flush_cache: bool = True,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"update_weight_buffer_size is {bucket_bytes}, expected at least 1")
        self._engine = engine
        self._directory = Path(directory).resolve()
        self._hf_checkpoint = Path(hf_checkpoint)
        self._bucket_bytes = bucket_bytes
        self._flush_cache = flush_cache

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Write one version, have it loaded, drop the older ones.

        Raises EngineError from the engine and ValueError for a fused expert name or no tensor.
        """
        began = time.monotonic()
        final = self._directory / f"v{version:06d}"
        partial = self._directory / f".v{version:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._copy_config(partial)
        num_tensors, num_bytes, num_shards = write_shards(
            named_tensors, partial, shard_bytes=self._bucket_bytes
        )
        # A reader sees a whole checkpoint or none.
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        self._engine.update_weights_from_disk(
            str(final), weight_version=version, flush_cache=self._flush_cache
        )
        for other in self._directory.iterdir():
            if other != final and _VERSION_DIR.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)
        return Published(version, num_tensors, num_bytes, num_shards, time.monotonic() - began)

    def _copy_config(self, target: Path) -> None:
        for source in sorted(self._hf_checkpoint.iterdir()):
            if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(source, target / source.name)

    def reconnect(self) -> None:
        """Nothing is held that a new server would miss."""

    def close(self) -> None:
        """Nothing is held; the newest version stays on disk."""


def write_shards(
    named_tensors: NamedTensors, directory: Path, *, shard_bytes: int
) -> tuple[int, int, int]:
    """Write tensors as safetensors shards of about ``shard_bytes`` with their index.

    Returns (tensors, bytes, shards).  Raises ValueError for a fused expert name, a name that comes
    twice, or no tensor.
    """
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, int] = {}
    size = total = num_shards = 0

    def flush() -> None:
        nonlocal shard, size, num_shards
        save_file(shard, directory / f"shard-{num_shards:05d}.safetensors", {"format": "pt"})
        shard, size, num_shards = {}, 0, num_shards + 1

    for name, tensor in named_tensors:
        if check_name(name) in where:
            raise ValueError(f"weight {name!r} came twice")
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
        # A copy: tensors may be views of one storage, which safetensors refuses.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        where[name] = num_shards
        size += tensor.nbytes
        total += tensor.nbytes
    if not where:
        raise ValueError("there was no weight to publish")
    flush()
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for i, name in enumerate(names):
        os.replace(directory / f"shard-{i:05d}.safetensors", directory / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[i] for name, i in where.items()},
    }
    with open(directory / "model.safetensors.index.json", "w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
    return len(where), total, num_shards

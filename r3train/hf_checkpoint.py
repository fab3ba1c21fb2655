"""Hugging Face checkpoints as this project writes them: shards with their index, and exports.

Tensors have the names of a checkpoint on disk, one tensor an expert.  SGLang accepts transformers'
fused in-memory expert names, answers "Succeeded" and leaves the experts as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

NamedTensors = Iterable[tuple[str, torch.Tensor]]

SHARD_BYTES = 5 * 1024**3
MARKER = "r3train_export.json"
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.|$)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def check_name(name: str) -> str:
    """Return ``name``; raises ValueError for a fused expert tensor, which SGLang would ignore."""
    if _FUSED_EXPERTS.search(name):
        raise ValueError(
            f"weight {name!r} is a fused expert tensor: SGLang answers success and does not load "
            "it; send per-expert names such as mlp.experts.0.gate_proj.weight"
        )
    return name


def write_shards(
    named_tensors: NamedTensors, directory: Path, *, shard_bytes: int
) -> tuple[int, int, int]:
    """Write tensors as safetensors shards of about ``shard_bytes`` with their index.

    Returns (tensors, bytes, shards).  Raises ValueError for a fused expert name, a name that comes
    twice, or no tensor.
    """
    shard: dict[str, torch.Tensor] = {}
    shard_of: dict[str, int] = {}
    size = total = num_shards = 0

    def flush() -> None:
        nonlocal shard, size, num_shards
        save_file(shard, directory / f"shard-{num_shards:05d}.safetensors", {"format": "pt"})
        shard, size, num_shards = {}, 0, num_shards + 1

    for name, tensor in named_tensors:
        if check_name(name) in shard_of:
            raise ValueError(f"weight {name!r} came twice")
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
        # A copy: tensors may be views of one storage, which safetensors refuses.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        shard_of[name] = num_shards
        size += tensor.nbytes
        total += tensor.nbytes
    if not shard_of:
        raise ValueError("there was no weight to publish")
    flush()
    files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for i, file in enumerate(files):
        os.replace(directory / f"shard-{i:05d}.safetensors", directory / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: files[i] for name, i in shard_of.items()},
    }
    with open(directory / "model.safetensors.index.json", "w", encoding="utf-8") as stream:
        json.dump(index, stream, indent=1)
    return len(shard_of), total, num_shards


def copy_all_but_weights(hf_checkpoint: Path, directory: Path) -> None:
    """Copy the configuration and tokenizer files of a checkpoint."""
    for source in sorted(hf_checkpoint.iterdir()):
        if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(source, directory / source.name)


def check_export_directory(directory: Path, hf_checkpoint: Path) -> None:
    """Raise ValueError for a directory whose content an export must not replace."""
    if directory.resolve() == hf_checkpoint.resolve():
        raise ValueError(f"--save-hf {directory} would replace --hf-checkpoint: name another place")
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"--save-hf {directory}: got a file, expected a directory")
    if any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise ValueError(
            f"--save-hf {directory} holds something that is no earlier export (no {MARKER} in it),"
            " and an export replaces all: name another place, or empty it"
        )


def export_checkpoint(
    named_tensors: NamedTensors, directory: Path, *, hf_checkpoint: Path
) -> tuple[int, int]:
    """Write ``directory`` with the weights, and configuration and tokenizer of ``hf_checkpoint``.

    transformers and SGLang load it.  An earlier export is replaced once the new one is whole.
    Returns (tensors, bytes).  Raises OSError (a full disk) with the old one intact, and ValueError
    as ``write_shards`` and ``check_export_directory`` do.
    """
    check_export_directory(directory, hf_checkpoint)
    partial = directory.with_name(f".{directory.name}.partial")
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        num_tensors, num_bytes, _ = write_shards(named_tensors, partial, shard_bytes=SHARD_BYTES)
        copy_all_but_weights(hf_checkpoint, partial)
        facts = {"num_tensors": num_tensors, "num_bytes": num_bytes}
        (partial / MARKER).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            os.replace(directory, earlier)
        os.replace(partial, directory)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_tensors, num_bytes

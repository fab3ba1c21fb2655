"""The actor's weights as a Hugging Face checkpoint that transformers and SGLang load."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from r3train.engine.publish import NamedTensors
from r3train.engine.publish_disk import WEIGHT_SUFFIXES, write_shards

SHARD_BYTES = 5 * 1024**3
MARKER = "r3train_export.json"


def check_export_directory(directory: Path, hf_checkpoint: Path) -> None:
    """Raises ValueError for a place whose content an export must not replace."""
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

    An earlier export is replaced once the new one is whole.  Returns (tensors, bytes).
    Raises OSError (a full disk) with the old one intact, and ValueError as ``write_shards`` and
    ``check_export_directory`` do.
    """
    check_export_directory(directory, hf_checkpoint)
    partial = directory.with_name(f".{directory.name}.partial")
    earlier = directory.with_name(f".{directory.name}.earlier")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        num_tensors, num_bytes, _ = write_shards(named_tensors, partial, shard_bytes=SHARD_BYTES)
        for source in sorted(hf_checkpoint.iterdir()):
            if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(source, partial / source.name)
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

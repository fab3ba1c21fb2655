"""The actor's weights as a Hugging Face checkpoint that transformers and SGLang load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from r3train.weights.publish import NamedTensors
from r3train.weights.publish_disk import WEIGHT_SUFFIXES, write_shards

SHARD_BYTES = 5 * 1024**3


def export_checkpoint(
    named_tensors: NamedTensors, directory: Path, *, hf_checkpoint: Path
) -> tuple[int, int]:
    """Write ``directory`` with the weights, and configuration and tokenizer of ``hf_checkpoint``.

    What was there before is replaced once the new one is whole.  Returns (tensors, bytes).
    Raises OSError (a full disk) with the old one intact, and ValueError as ``write_shards`` does.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        num_tensors, num_bytes, _ = write_shards(named_tensors, partial, shard_bytes=SHARD_BYTES)
        for source in sorted(hf_checkpoint.iterdir()):
            if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(source, partial / source.name)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_tensors, num_bytes

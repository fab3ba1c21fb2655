"""Memory for the weights that SGLang's server receives by broadcast, kept for the next bucket.

SGLang takes new memory for every bucket.  On CUDA torch's allocator has it; on a CPU the system clears each page of
it, for longer than gloo takes to fill it.

Source: SGLang 0.5.23, ``WeightUpdater._receive_bucketed_weights_from_distributed``, which broadcasts into it.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from r3train.patches import patch

_empty = FlattenedTensorBucket.empty
_kept = mmap.mmap(-1, mmap.PAGESIZE)


def _empty_in_kept_memory(
    _cls: type, names: Any, dtypes: Any, shapes: Any, device: Any
) -> FlattenedTensorBucket:
    """Return SGLang's bucket, in memory that is kept unless tensors of an earlier bucket are still there."""
    global _kept
    bucket = _empty(
        names, dtypes, shapes, device
    )  # nothing is written to it, so it has no page yet
    size = bucket.flattened_tensor.nbytes
    if (
        size > len(_kept) or sys.getrefcount(_kept) > 2
    ):  # this module's, and the argument of the question
        _kept = mmap.mmap(-1, size)
    bucket.flattened_tensor = torch.frombuffer(_kept, dtype=torch.uint8, count=size)
    return bucket


def keep() -> None:
    """Let buckets of this process share memory, one after another."""
    patch(
        FlattenedTensorBucket,
        "empty",
        classmethod(_empty_in_kept_memory),
        expects="(names, dtypes, shapes, device)",
        why="a CPU's pages are cleared anew for every bucket of weights",
    )

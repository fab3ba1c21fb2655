"""The random state of one rank, as a file of its checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from megatron.core import tensor_parallel
from safetensors import safe_open
from safetensors.torch import save_file

_TRACKER = "tracker."


def path_of(directory: Path, rank: int) -> Path:
    """Return the file of a rank's random state in a checkpoint."""
    return directory / f"rng_{rank:05d}.safetensors"


def save(directory: Path, rank: int) -> None:
    """Write the random state of torch (host, device), Megatron's trackers, numpy and Python."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        tensors[_TRACKER + name] = state.cpu().clone()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(keys.astype(np.int64))
    facts = {
        "numpy": json.dumps([kind, int(position), int(has_gauss), float(gauss)]),
        "python": json.dumps(random.getstate()),
    }
    save_file(tensors, path_of(directory, rank), facts)


def load(directory: Path, rank: int) -> bool:
    """Restore the state that ``save`` wrote; raises ValueError for a missing or broken file.

    Returns False and restores nothing if it was written with CUDA and is read without, or the other way: the
    trackers' states are the device's.
    """
    path = path_of(directory, rank)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            facts = file.metadata()
        kind, position, has_gauss, gauss = json.loads(facts["numpy"])
        version, keys, gauss_next = json.loads(facts["python"])
    except Exception as error:  # safetensors has its own exception, next to OSError
        raise ValueError(f"{path}: cannot read the random state: {error}") from error
    if ("cuda" in tensors) != torch.cuda.is_available():
        return False
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    tracked = {n.removeprefix(_TRACKER): t for n, t in tensors.items() if n.startswith(_TRACKER)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
    np.random.set_state(
        (kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss)
    )
    random.setstate((version, tuple(keys), gauss_next))
    return True

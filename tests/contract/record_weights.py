"""Record what Megatron's ranks hold of a checkpoint: ``python tests/contract/record_weights.py``.

With names of families it records these only, with "fields" only ``fields.json``.  For every case there is
a file in ``weights/``: its config.json, its tensors' shapes, and of every parameter the tensors in it and a
checksum of each rank's shard, in several topologies.  ``fields.json`` has Megatron's configuration of these
and of the published models.  The weights are a formula of the tensor's name and place (``pattern``), so that a
test needs no checkpoint, no rank and no transformers.

The records of the first 14 families were made by mbridge 0.15.1, which loaded checkpoints before r3train had
tables of weights.  Whoever records again compares with them: a difference is a bug, but for a new family.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from safetensors.torch import save_file  # noqa: E402

from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.families import FAMILIES  # noqa: E402
from r3train.families.family import model_arguments  # noqa: E402
from r3train.families.published import PUBLISHED  # noqa: E402
from r3train.hf_checkpoint import read_header  # noqa: E402
from r3train.verify.tiny import random_model, save  # noqa: E402
from tests.oracle import actors, test_families  # noqa: E402
from tests.oracle.actors import actor_of, configuration, in_ranks  # noqa: E402
from r3train.cpu.device import prepare_device  # noqa: E402

prepare_device()  # before Megatron is imported

WEIGHTS = HERE / "weights"
# name -> keys of its configuration that differ from the tiny model's
CASES: dict[str, dict[str, Any]] = test_families.CASES | {
    "qwen3_moe with a tied output layer": dict(tie_word_embeddings=True),
    "qwen3_moe of one key head": dict(num_key_value_heads=1),
}
_TP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
# name -> (number of ranks, settings)
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "bf16": (1, dict(bf16=True)),
    "TP2": (2, _TP),
    "TP2 ETP2": (2, _TP | dict(expert_tensor_parallel_size=2)),
    "EP2": (2, dict(expert_model_parallel_size=2)),
    "PP2": (2, dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1)),
    "TE TP2": (2, _TP | dict(attention_backend="te")),  # on stand-ins of its kernels
}


def pattern(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a checkpoint, float32: numbers in [-1, 1) that differ from place to place.

    >>> pattern("model.norm.weight", (3,))
    tensor([-0.8570, -0.4236,  0.0098])
    """
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.int64) * 2654435761 + zlib.crc32(name.encode())
    return ((steps % 2**24).double() / 2**23 - 1).float().view(shape)


def checksum(tensor: torch.Tensor) -> str:
    """Return 8 hexadecimal digits of the tensor's dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=4)
    digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def file_of(name: str) -> Path:
    """The record of a case."""
    return WEIGHTS / f"{name.replace(' ', '_').replace(',', '')}.json"


def make(directory: Path, name: str) -> None:
    """Write a case's checkpoint, with ``pattern`` for weights."""
    options = test_families.options_of(name)
    options = replace(options, num_experts=min(options.num_experts, 4))
    save(random_model(options, **CASES[name]), directory, options)
    if name in test_families.AS_RELEASED:
        test_families.with_keys_of_releases(directory / "config.json")
    file = directory / "model.safetensors"
    shapes = {tensor: kind.shape for tensor, kind in read_header(file).items()}
    save_file({tensor: pattern(tensor, shape) for tensor, shape in shapes.items()}, file)


def shards(directories: list[str], parallel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each directory the parameters that a rank holds: {name: (tensors in it, checksum)}; in a rank."""
    from r3train.trainer.megatron.hf_weights import chunk_weights

    found = {}
    for directory in directories:
        with actor_of(configuration(Path(directory), **parallel)) as actor:
            (chunk,) = actor.model.chunks
            found[directory] = {
                weight.name: (weight.hf.names, checksum(weight.tensor))
                for weight in chunk_weights(actor.model.weights, chunk)
            }
    return found


def fields(directory: Path) -> dict[str, str]:
    """Return what of Megatron's configuration and model is not the default, as text."""
    from r3train.trainer.megatron.model import transformer_overrides_of
    from r3train.trainer.megatron.transformer_config import build_transformer_config

    run, hf = configuration(directory), read_hf_facts(directory)
    # as with Transformer Engine: Megatron's own layers leave out fusions
    overrides = transformer_overrides_of(run, hf, True, torch.device("cpu"))
    config = build_transformer_config(hf, run.parallel, torch.bfloat16, overrides)
    default = {name: getattr(type(config), name, None) for name in vars(config)}
    arguments = model_arguments(FAMILIES[hf.model_type], hf)
    return (
        {"class": type(config).__name__}
        | {name: as_text(v) for name, v in vars(config).items() if v != default[name]}
        | {f"GPTModel.{name}": as_text(v) for name, v in arguments.items()}
    )


def as_text(value: Any) -> str:
    """Write a field's value, a function by its name."""
    return getattr(value, "__name__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(value))


def record(names: list[str], scratch: Path) -> None:
    """Write the records of cases."""
    directories = {name: scratch / file_of(name).stem for name in names}
    for name, directory in directories.items():
        make(directory, name)
    rows: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names}
    for topology, (size, parallel) in TOPOLOGIES.items():
        actors.SEARCHED[:] = [str(test_families.STAND_INS)] if topology.startswith("TE") else []
        taken = {
            name: str(directory)
            for name, directory in directories.items()
            if test_families.takes(name, parallel)
        }
        ranks = in_ranks(
            size, scratch / f"ranks {topology}", shards, list(taken.values()), parallel
        )
        for name, directory in taken.items():
            for rank, found in enumerate(ranks):
                for parameter, (tensors, digest) in found[directory].items():
                    row = rows[name].setdefault(parameter, {})
                    # of expert and pipeline ranks the same name is another parameter
                    if topology not in ("EP2", "PP2"):
                        row["tensors"] = tensors
                    row.setdefault(topology, ["-"] * size)[rank] = digest
        print(topology, len(taken), "cases", flush=True)
    for name, directory in directories.items():
        kinds = read_header(directory / "model.safetensors")
        write(
            file_of(name),
            {
                "config": json.loads((directory / "config.json").read_text()),
                "tensors": {tensor: list(kind.shape) for tensor, kind in sorted(kinds.items())},
                "parameters": dict(sorted(rows[name].items())),
            },
        )


def configs() -> dict[str, dict[str, Any]]:
    """Return the config.json of every recorded case and of every published model."""
    recorded = {file.stem: json.loads(file.read_text()) for file in sorted(WEIGHTS.glob("*.json"))}
    found = {name: record["config"] for name, record in recorded.items() if name != "fields"}
    files = sorted(PUBLISHED.glob("*/config.json"))
    return found | {file.parent.name: json.loads(file.read_text()) for file in files}


def record_fields(scratch: Path) -> None:
    """Write ``fields.json``."""
    found = {}
    for name, config in configs().items():
        directory = scratch / "fields" / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
        found[name] = fields(directory)
    write(WEIGHTS / "fields.json", found)


def write(file: Path, content: dict[str, dict[str, Any]]) -> None:
    """Write two levels of keys, a line for each pair of them, so that a difference can be read."""
    parts = []
    for key, value in content.items():
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
        parts.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    wanted = sys.argv[1:]
    scratch = Path(tempfile.mkdtemp())
    try:
        if wanted != ["fields"]:
            record([n for n in CASES if not wanted or n.split()[0] in wanted], scratch)
        record_fields(scratch)
    finally:
        shutil.rmtree(scratch)

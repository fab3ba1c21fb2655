"""Adapters of which no factor is zero, and checkpoints with them merged, of linears as each family has them on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.families import FAMILIES, tensor_names, tensor_shapes
from r3train.families.weights import DiskTensor
from r3train.hf_checkpoint import copy_all_but_weights

Factors = dict[str, torch.Tensor]


def in_one_tensor(family: str) -> DiskTensor | None:
    """The first tensor on disk that holds all experts of a layer, of a family that has such."""
    rows = next(f for f in FAMILIES.values() if family in f.tiny).weights.layer_weights
    return next((t for row in rows for t in row.disk if t.all_experts), None)


def drawn(base: Path, section: LoraSection, seed: int = 0) -> Factors:
    """Factors of rank 4 for every target of a checkpoint, none of them zero."""
    hf, factors = read_hf_facts(base), {}
    shapes = tensor_shapes(hf)
    for i, name in enumerate(sorted(section.targets(shapes))):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        for path, (rows, columns) in linears_of(name, shapes[name], hf.model_type):
            factors[f"{path}.lora_A"] = 0.2 * torch.randn(4, columns, generator=generator)
            factors[f"{path}.lora_B"] = 0.2 * torch.randn(rows, 4, generator=generator)
    return factors


def linears_of(name: str, shape: Sequence[int], family: str) -> list[tuple[str, Sequence[int]]]:
    """The linears of a tensor on disk with their shapes: one, or all experts of a layer."""
    *experts, rows, columns = shape
    if not experts:
        return [(name.removesuffix(".weight"), shape)]
    paths = [name.replace(".experts.", f".experts.{e}.") for e in range(experts[0])]
    expert = (columns, rows) if in_one_tensor(family).transposed else (rows, columns)
    return [(path, expert) for path in paths]


def as_linears(name: str, tensor: torch.Tensor, family: str) -> list[torch.Tensor]:
    """The matrices of ``linears_of``: on disk gate and up may alternate, in an adapter's B up is below gate."""
    if tensor.dim() == 2:
        return [tensor]
    experts = in_one_tensor(family)
    rows = [expert.T if experts.transposed else expert for expert in tensor]
    alternate = experts.groups is not None and "gate_up" in name
    return [torch.cat([r[0::2], r[1::2]]) for r in rows] if alternate else rows


def as_on_disk(name: str, linears: list[torch.Tensor], family: str) -> torch.Tensor:
    """Undo ``as_linears``."""
    if name.endswith(".weight"):
        return linears[0]
    experts = in_one_tensor(family)
    if experts.groups is not None and "gate_up" in name:
        linears = [torch.stack(w.chunk(2), 1).flatten(0, 1) for w in linears]
    return torch.stack([w.T if experts.transposed else w for w in linears]).contiguous()


def pairs_of(
    factors: Factors, name: str, shape: Sequence[int], family: str
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each linear of a tensor on disk: its path, A and B."""
    paths = [path for path, _ in linears_of(name, shape, family)]
    return [(p, *(factors[f"{p}.lora_{x}"].double() for x in "AB")) for p in paths]


def write_merged(base: Path, factors: Factors, section: LoraSection, directory: Path) -> Factors:
    """Write a checkpoint with the adapter merged into its base; returns its tensors."""
    hf, merged = read_hf_facts(base), load_file(base / "model.safetensors")
    for name in section.targets(tensor_names(hf)):
        whole = merged[name].double()
        pairs = pairs_of(factors, name, whole.shape, hf.model_type)
        deltas = [section.scale * b @ a for _, a, b in pairs]
        merged[name] = (whole + as_on_disk(name, deltas, hf.model_type)).float()
    directory.mkdir()
    copy_all_but_weights(base, directory)
    save_file(merged, directory / "model.safetensors", {"format": "pt"})
    return merged

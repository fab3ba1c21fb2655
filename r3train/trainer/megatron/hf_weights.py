"""Hugging Face checkpoints into Megatron's parameters, and comparisons of the two.

The first tensor rank of a parameter's first replica reads its tensors, one parameter at a time, and sends the
shards to its tensor ranks; the first replica sends them to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from safetensors import safe_open

from r3train.families.weights import OUTPUT_LAYER, ModelWeights
from r3train.hf_checkpoint import export_checksums, MARKER, weight_files
from r3train.trainer.megatron.checked_files import check_together
from r3train.trainer.megatron.weight_layout import TensorNames, HfTensors

ADAPTER = ".lora."  # in the name of a parameter of an adapter, which no checkpoint of a model has


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


@dataclass(frozen=True, slots=True)
class ChunkWeight:
    """A parameter or buffer of this rank that a checkpoint has: ``key`` of a module.

    ``name``: in the chunk.  The tensor is looked up each time, for DDP and offloading move it.
    """

    name: str
    hf: HfTensors
    module: torch.nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer itself: this rank's shard."""
        return getattr(self.module, self.key)

    @property
    def is_parameter(self) -> bool:
        """False for a buffer, which nothing trains: an expert bias."""
        return self.key in self.module._parameters

    @property
    def is_float32(self) -> bool:
        """True if it keeps float32 in an actor of bfloat16."""
        return self.hf.layout.weight.float32

    @property
    def is_tied_output(self) -> bool:
        """True for the last stage's copy of the embedding."""
        return self.name == OUTPUT_LAYER and self.hf.layout.weight.name != OUTPUT_LAYER


# names do not change from one weight update to the next, and finding them takes longer than the copy of a
# small expert
_weights_by_chunk: WeakKeyDictionary[torch.nn.Module, list[ChunkWeight]] = WeakKeyDictionary()


def chunk_weights(weights: ModelWeights, chunk: torch.nn.Module) -> list[ChunkWeight]:
    """Return what a chunk holds of a checkpoint, what keeps float32 first; found once for each chunk."""
    chunk = unwrap(chunk)
    if chunk not in _weights_by_chunk:
        ranks = ps.get_expert_model_parallel_world_size()
        layer_ids = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        names = TensorNames(
            weights,
            layer_ids,
            ps.get_expert_model_parallel_rank() * (weights.sizes["experts"] // ranks),
        )
        # in front: an export is sent in buckets of one dtype
        found = sorted(_find(names, chunk), key=lambda one: not one.is_float32)
        met = {(one.hf.prefix, one.hf.layout.weight.name) for one in found}
        for row, prefix in weights.layer_rows(layer_ids):
            assert (prefix, row.name) in met, f"the row {row.name} is no parameter of {prefix}"
        _weights_by_chunk[chunk] = found
    return _weights_by_chunk[chunk]


def _find(names: TensorNames, chunk: torch.nn.Module) -> Iterator[ChunkWeight]:
    for path, module in chunk.named_modules():
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in tensors.items():
                name = f"{path}.{key}"
                if tensor is None or ADAPTER in name:
                    continue
                hf = names.find(name)
                # buffers that no row names are Megatron's own: counts of tokens, frequencies
                assert hf is not None or not is_parameter, f"no row of the table is {name}"
                if hf is not None:
                    yield ChunkWeight(name, hf, module, key)


class CheckpointTensors:
    """The tensors of a checkpoint, read one by one.

    Files are opened at the first ``read``: ranks that only receive open none.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    @cached_property
    def _file_of(self) -> dict[str, Any]:
        shards = [safe_open(file, "pt") for file in weight_files(self.directory)]
        return {name: shard for shard in shards for name in shard.keys()}

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Return a tensor, or its row of one expert.

        Raises ValueError for a name that is not there, and for numbers that are not finite.
        """
        if name not in self._file_of:
            raise ValueError(f"{self.directory}: {name} is missing")
        file = self._file_of[name]
        tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert]
        if not math.isfinite(tensor.sum(dtype=torch.float32)):  # a NaN or infinity stays in a sum
            raise ValueError(f"{self.directory}: {name} holds NaN or infinite numbers")
        return tensor


def _whole(checkpoint: CheckpointTensors, hf: HfTensors) -> torch.Tensor:
    """Read a whole parameter, in Megatron's layout and the checkpoint's dtype.

    Raises ValueError for a tensor of another shape than config.json has it.
    """
    row = hf.expert if hf.layout.all_experts else None
    tensors = [checkpoint.read(name, row) for name in hf.names]
    for name, tensor, expected in zip(hf.names, tensors, hf.layout.disk_shapes, strict=True):
        if tensor.shape != expected:
            raise ValueError(
                f"{checkpoint.directory}: {name} has the shape {list(tensor.shape)}, expected"
                f" {list(expected)} by config.json"
            )
    return hf.layout.from_disk(tensors)


def _shard(tensors: CheckpointTensors, one: ChunkWeight) -> torch.Tensor:
    """Return this rank's shard, in the parameter's dtype and on its device; a collective of its tensor ranks."""
    layout, like = one.hf.layout, one.tensor
    group = tensor_group(one)
    shards = None
    if group.rank() == 0:
        whole = _whole(tensors, one.hf)
        shards = [
            shard.to(like.device, like.dtype).contiguous()
            for shard in layout.shards(whole, group.size())
        ]
        for shard in shards:
            assert shard.shape == like.shape, f"{one.name}: {shard.shape}, expected {like.shape}"
    if group.size() == 1:
        return shards[0]
    received = torch.empty_like(like)
    dist.scatter(received, shards, group=group, group_src=0)
    return received


def tensor_group(one: ChunkWeight) -> dist.ProcessGroup:
    """Return the ranks that hold the shards of one replica."""
    if one.hf.layout.weight.is_expert:
        return ps.get_expert_tensor_parallel_group()
    return ps.get_tensor_model_parallel_group()


def _replicas(one: ChunkWeight) -> dist.ProcessGroup:
    """Return the ranks that hold the same shard."""
    if one.hf.layout.weight.is_expert:
        return ps.get_expert_data_parallel_group()
    return ps.get_data_parallel_group(with_context_parallel=True)


@torch.no_grad()
def load_hf_weights(weights: ModelWeights, chunks: Sequence[torch.nn.Module], path: Path) -> None:
    """Load the chunks' parameters from a checkpoint's safetensors; a collective.

    Of an export of ours each rank checks its share of the files before: raises ValueError for one of another
    content.
    """
    if sums := export_checksums(path):
        check_together(path, sums, path / MARKER)
    tensors = CheckpointTensors(path)
    for chunk in chunks:
        for one in chunk_weights(weights, chunk):
            assert not one.is_float32 or one.tensor.dtype is torch.float32, one.name
            if _replicas(one).rank() == 0:
                one.tensor.copy_(_shard(tensors, one))
        for one in chunk_weights(weights, chunk):
            group = _replicas(one)
            if group.size() > 1:
                dist.broadcast(one.tensor, group=group, group_src=0)


@torch.no_grad()
def parameters_unlike(
    weights: ModelWeights,
    chunks: Sequence[torch.nn.Module],
    path: Path,
    value_of: Callable[[torch.Tensor], torch.Tensor] = lambda p: p,
) -> list[str]:
    """This rank's parameters that differ from those that a checkpoint would load, bit for bit.

    value_of: what was exported for a parameter.  A collective, in which every replica reads: it shows that an
    export is what the actor holds, without the code that exported it.
    """
    tensors = CheckpointTensors(path)
    return [
        one.name
        for chunk in chunks
        for one in chunk_weights(weights, chunk)
        if not _same_bytes(value_of(one.tensor), _shard(tensors, one))
    ]


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)

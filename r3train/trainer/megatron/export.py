"""Export of sharded parameters as whole tensors under Hugging Face names.

Each pipeline stage gathers per parameter over its tensor (or expert and expert-tensor) ranks to the
stage's first rank, its *leader*, which gives it the names and layouts of the disk.  Leaders broadcast
what they have to the servers, or those of later stages stream it to rank 0.  Ranks that hold copies
(other data- or context-parallel ranks) take no part.  Only leaders ever hold a whole tensor, and where
ranks write their own experts, the first of an expert's tensor ranks that of an expert.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from r3train.families.weights import ModelWeights
from r3train.trainer.megatron.hf_weights import chunk_weights, ChunkWeight, tensor_group
from r3train.trainer.megatron.weight_layout import Layout

_HEADER_BYTES = 512
# ranks that yield whole tensors: rank 0; each stage's leader; leaders, and of experts the ranks that hold them
GatherTo = Literal["rank_0", "leaders", "owners"]


@torch.no_grad()
def export_hf_weights(
    weights: ModelWeights,
    chunks: Sequence[torch.nn.Module],
    value_of: Callable[[torch.Tensor], torch.Tensor] = lambda p: p,
    is_wanted: Callable[[ChunkWeight], bool] = lambda one: True,
    *,
    gather_to: GatherTo = "rank_0",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (per-expert HF name, whole tensor) on rank 0, nothing elsewhere.

    gather_to: "leaders" yields those of each pipeline stage on its leader instead; "owners" does too, but an
    expert's on the first rank that holds it, unless they are one tensor with other experts'.
    value_of: returns the tensor to export for a parameter: the parameter itself, or its gradient.
    is_wanted: False for a parameter that is left out, the same on every rank that holds a part of it.
    A collective: every rank must drain the iterator.  One tensor at a time is whole, or the experts
    of one layer.
    """
    named = _stage_tensors(weights, chunks, value_of, is_wanted, gather_to == "owners")
    yield from to_rank_0(named) if gather_to == "rank_0" else named


def _stage_tensors(
    weights: ModelWeights,
    chunks: Sequence[torch.nn.Module],
    value_of: Callable[[torch.Tensor], torch.Tensor],
    is_wanted: Callable[[ChunkWeight], bool],
    own_experts: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this stage's tensors as they are on disk, on its leader, or on owners."""
    fused = _ExpertTensors(weights.sizes["experts"])
    for layout, names, expert, whole in _whole_parameters(
        weights, chunks, value_of, is_wanted, own_experts
    ):
        tensors = zip(names, layout.to_disk(whole), strict=True)
        if not layout.all_experts:
            yield from tensors
            continue
        for name, row in tensors:
            if (tensor := fused.add(name, expert, row)) is not None:
                yield name, tensor


def to_rank_0(
    named: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of all pipeline stages' leaders on rank 0, nothing elsewhere.

    named: those of this rank's stage, a collective of the stage; it yields on its leader only.
    """
    if ps.get_pipeline_model_parallel_rank() > 0:
        for name, tensor in named:
            _send(name, tensor)
        if is_leader():
            _send("", None)
        return
    yield from named
    if is_leader():
        for stage in range(1, ps.get_pipeline_model_parallel_world_size()):
            while (received := _receive(stage * _stage_size())) is not None:
                yield received


def _stage_size() -> int:
    return dist.get_world_size() // ps.get_pipeline_model_parallel_world_size()


def is_leader() -> bool:
    """Return True on the first rank of a pipeline stage."""
    return dist.get_rank() == ps.get_pipeline_model_parallel_rank() * _stage_size()


def _whole_parameters(
    weights: ModelWeights,
    chunks: Sequence[torch.nn.Module],
    value_of: Callable[[torch.Tensor], torch.Tensor],
    is_wanted: Callable[[ChunkWeight], bool],
    own_experts: bool,
) -> Iterator[tuple[Layout, list[str], int | None, torch.Tensor]]:
    """Yield this stage's parameters, whole, on its leader or owners: layout, names on disk, expert, tensor."""
    sends = ps.get_data_parallel_rank(with_context_parallel=True) == 0
    expert_sends = ps.get_expert_data_parallel_rank() == 0
    first_shard, leads = ps.get_expert_tensor_parallel_rank() == 0, is_leader()
    expert_group = ps.get_expert_model_parallel_group()
    experts_per_rank = weights.sizes["experts"] // expert_group.size()
    for chunk in chunks:
        for one in chunk_weights(weights, chunk):
            tensor, hf = one.tensor, one.hf
            # the first stage exports a tied output layer, as the embedding
            if one.is_tied_output or not is_wanted(one):
                continue
            layout = hf.layout
            if not (expert_sends if layout.weight.is_expert else sends):
                continue
            group = tensor_group(one) if layout.weight.sharded else None
            shards = gather(value_of(tensor), group)
            if not layout.weight.is_expert:
                if leads:
                    yield layout, hf.names, None, layout.join(shards)
                continue
            if not first_shard:
                continue
            # a local expert of every expert-parallel rank, or of this one
            group = None if own_experts and not layout.all_experts else expert_group
            experts = gather(layout.join(shards).contiguous(), group)
            for ep_rank, expert in enumerate(experts or ()):
                number = hf.expert + ep_rank * experts_per_rank
                yield layout, hf.names_of_expert(number), number, expert


class _ExpertTensors:
    """Tensors of all experts of a layer that are not whole yet."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts
        self._waiting: dict[str, tuple[torch.Tensor, set[int]]] = {}

    def add(self, name: str, expert: int, row: torch.Tensor) -> torch.Tensor | None:
        """Copy one expert's row, for its parameter may move; return the tensor with its last row."""
        if name not in self._waiting:
            self._waiting[name] = row.new_empty((self._num_experts, *row.shape)), set()
        tensor, rows = self._waiting[name]
        tensor[expert] = row
        rows.add(expert)
        return self._waiting.pop(name)[0] if len(rows) == self._num_experts else None


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor] | None:
    """Return all members' tensors on the group's first rank, None on the others."""
    if group is None or group.size() == 1:
        return [tensor]
    shards = None
    if group.rank() == 0:
        shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.gather(tensor.contiguous(), shards, group=group, group_dst=0)
    return shards


def _send(name: str, tensor: torch.Tensor | None) -> None:
    """Stream one tensor to rank 0: a fixed-size JSON header, then the bytes; None ends the stream."""
    header = b"{}"
    if tensor is not None:
        facts = {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        header = json.dumps(facts).encode()
    device = torch.cuda.current_device()
    padded = torch.frombuffer(bytearray(header.ljust(_HEADER_BYTES)), dtype=torch.uint8)
    dist.send(padded.to(device), dst=0)
    if tensor is not None:
        dist.send(tensor.contiguous(), dst=0)


def _receive(src: int) -> tuple[str, torch.Tensor] | None:
    device = torch.cuda.current_device()
    padded = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=device)
    dist.recv(padded, src=src)
    facts = json.loads(bytes(padded.cpu().tolist()))
    if not facts:
        return None
    dtype = getattr(torch, facts["dtype"].removeprefix("torch."))
    tensor = torch.empty(facts["shape"], dtype=dtype, device=device)
    dist.recv(tensor, src=src)
    return facts["name"], tensor

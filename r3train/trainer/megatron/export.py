"""Export of sharded parameters as whole tensors under Hugging Face names.

Each pipeline stage gathers a parameter over its tensor (or expert and expert-tensor) ranks to the
stage's first rank, its *leader*, which translates names and layouts through mbridge.  Leaders broadcast
what they have to the servers, or those of later stages stream it to rank 0.  Ranks that hold copies
(other data- or context-parallel ranks) take no part.  Only leaders ever hold a whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from r3train.trainer.megatron.hf_bridge import EXPERT, OUTPUT_LAYER, as_te_names, unwrap

_HEADER_BYTES = 512


@torch.no_grad()
def export_hf_weights(
    bridge: Any,
    chunks: Sequence[torch.nn.Module],
    value_of: Callable[[torch.Tensor], torch.Tensor] = lambda p: p,
    is_wanted: Callable[[torch.Tensor], bool] = lambda p: True,
    *,
    of_stage: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (per-expert HF name, whole tensor) on rank 0, nothing elsewhere.

    of_stage: yield those of each pipeline stage on its leader instead.
    value_of: returns the tensor to export for a parameter: the parameter itself, or its gradient.
    is_wanted: False for a parameter that is left out, the same on every rank that holds a part of it.
    A collective: every rank must drain the iterator.  One tensor at a time is whole, or the experts
    of one layer.
    """
    named = (
        each
        for name, tensor in _merged_parameters(bridge, chunks, value_of, is_wanted)
        for each in zip(*bridge._weight_to_hf_format(name, tensor))
    )
    yield from named if of_stage else to_rank_0(named)


def to_rank_0(
    of_stage: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of all pipeline stages' leaders on rank 0, nothing elsewhere.

    of_stage: those of this rank's stage, a collective of the stage; it yields on its leader alone.
    """
    if ps.get_pipeline_model_parallel_rank() > 0:
        for name, tensor in of_stage:
            _send(name, tensor)
        if is_leader():
            _send("", None)
        return
    yield from of_stage
    if is_leader():
        for stage in range(1, ps.get_pipeline_model_parallel_world_size()):
            while (received := _receive(stage * _stage_size())) is not None:
                yield received


def _stage_size() -> int:
    return dist.get_world_size() // ps.get_pipeline_model_parallel_world_size()


def is_leader() -> bool:
    """Return True on the first rank of a pipeline stage."""
    return dist.get_rank() == ps.get_pipeline_model_parallel_rank() * _stage_size()


@dataclass(frozen=True, slots=True)
class _Part:
    """The parameter or buffer ``key`` of a module, and its global TE name."""

    name: str
    module: torch.nn.Module
    key: str


# names do not change from one weight update to the next, and finding them takes longer than the copy of a
# small expert
_parts_of: WeakKeyDictionary[torch.nn.Module, list[_Part]] = WeakKeyDictionary()


def _parts(bridge: Any, chunk: torch.nn.Module) -> list[_Part]:
    """Name what an export takes of a chunk, expert biases first; once for each chunk."""
    chunk = unwrap(chunk)
    if chunk not in _parts_of:
        adapted = as_te_names(chunk)
        global_names = bridge._weight_name_mapping_mcore_local_to_global(adapted, consider_ep=False)
        places = {
            id(parameter): (module, key)
            for module in chunk.modules()
            for key, parameter in module._parameters.items()
        }
        found = {}
        for local_name in adapted.state_dict():
            if "expert_bias" in local_name:
                path, _, key = local_name.rpartition(".")
                found[local_name] = chunk.get_submodule(path), key
        found |= {n: places[id(parameter)] for n, parameter in adapted.named_parameters()}
        _parts_of[chunk] = [_Part(global_names[n], *place) for n, place in found.items()]
    return _parts_of[chunk]


def _merged_parameters(
    bridge: Any,
    chunks: Sequence[torch.nn.Module],
    value_of: Callable[[torch.Tensor], torch.Tensor],
    is_wanted: Callable[[torch.Tensor], bool],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this stage's parameters, whole, under global TE names, on its leader alone."""
    tied = bridge.hf_config.tie_word_embeddings
    sends = ps.get_data_parallel_rank(with_context_parallel=True) == 0
    tensor_group, leads = ps.get_tensor_model_parallel_group(), is_leader()
    merge_expert = _expert_merger(bridge)
    for chunk in chunks:
        for part in _parts(bridge, chunk):
            name, tensor = part.name, getattr(part.module, part.key)
            if name == OUTPUT_LAYER and tied:
                continue  # the first stage exports it under the embedding's name
            if not is_wanted(tensor):
                continue
            if EXPERT in name:
                yield from merge_expert(name, value_of(tensor))
            elif sends:
                split = getattr(tensor, "tensor_model_parallel", False)
                shards = gather(value_of(tensor), tensor_group if split else None)
                if leads:
                    whole = shards[0]
                    if split:
                        whole = bridge._weight_merge_across_tp(name, shards, tensor)
                    yield name, whole


def _expert_merger(
    bridge: Any,
) -> Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]:
    """Return a function that gathers a local expert of every expert-parallel rank: ETP shards first, then EP ranks."""
    sends = ps.get_expert_data_parallel_rank() == 0
    tensor_group, expert_group = (
        ps.get_expert_tensor_parallel_group(),
        ps.get_expert_model_parallel_group(),
    )
    first_shard, leads = ps.get_expert_tensor_parallel_rank() == 0, is_leader()
    ep_size = ps.get_expert_model_parallel_world_size()

    def merge(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not sends:
            return
        shards = gather(tensor, tensor_group)
        whole = None
        if shards is not None:
            whole = bridge._weight_merge_across_tp(name, shards, tensor).contiguous()
        if not first_shard:
            return
        experts = gather(whole, expert_group)
        if leads:
            prefix, local_id = name.split(".weight")
            per_rank = bridge.config.num_moe_experts // ep_size
            for ep_rank, expert in enumerate(experts):
                yield f"{prefix}.weight{ep_rank * per_rank + int(local_id)}", expert

    return merge


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

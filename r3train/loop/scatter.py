"""Slices from rank 0 to the ranks that need them, and small facts between all ranks.

Nothing is pickled: a message is a JSON header and the raw bytes of its arrays, over the default
group's CPU (gloo) side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3train.types import RankSlice, RankTopology


def pack_slices(slices: Sequence[RankSlice]) -> np.ndarray:
    """Encode slices as uint8[bytes]: 8 bytes of header length, the JSON header, the arrays."""
    header, payload = [], []
    for s in slices:
        entry: dict[str, Any] = {}
        for f in fields(s):
            value = getattr(s, f.name)
            if isinstance(value, np.ndarray):
                entry[f.name] = {"dtype": value.dtype.str, "shape": value.shape}
                payload.append(np.ascontiguousarray(value).view(np.uint8).reshape(-1))
            else:
                entry[f.name] = value
        header.append(entry)
    head = json.dumps(header).encode()
    size = np.frombuffer(len(head).to_bytes(8, "little"), dtype=np.uint8)
    return np.concatenate([size, np.frombuffer(head, dtype=np.uint8), *payload])


def unpack_slices(message: np.ndarray) -> list[RankSlice]:
    """The inverse of ``pack_slices``; arrays are views into the message."""
    size = int.from_bytes(message[:8].tobytes(), "little")
    header = json.loads(message[8 : 8 + size].tobytes())
    offset = 8 + size
    slices = []
    for entry in header:
        values = {}
        for name, value in entry.items():
            if isinstance(value, dict):
                dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
                nbytes = dtype.itemsize * int(np.prod(shape))
                # a copy where the bytes are not aligned, a view elsewhere
                raw = message[offset : offset + nbytes]
                value = np.frombuffer(raw.tobytes(), dtype=dtype).reshape(shape).copy()
                offset += nbytes
            values[name] = value
        slices.append(RankSlice(**values))
    assert offset == message.shape[0], (offset, message.shape)
    return slices


def scatter_slices(slices_of_rank: Sequence[Sequence[RankSlice]] | None) -> list[RankSlice]:
    """Send each rank its own slices from rank 0, and return this rank's.

    slices_of_rank: [world_size] on rank 0, None elsewhere.  Rank 0 keeps its own without a copy.
    """
    if dist.get_rank() == 0:
        assert slices_of_rank is not None and len(slices_of_rank) == dist.get_world_size()
        pending = []
        for rank in range(1, dist.get_world_size()):
            message = torch.from_numpy(pack_slices(slices_of_rank[rank]))
            dist.send(torch.tensor([message.numel()], dtype=torch.int64), dst=rank)
            pending.append((dist.isend(message, dst=rank), message))
        for work, _ in pending:
            work.wait()
        return list(slices_of_rank[0])
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src=0)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, src=0)
    return unpack_slices(message.numpy())


def broadcast_json(value: Any) -> Any:
    """Rank 0's JSON-able value on every rank."""
    size = torch.zeros(1, dtype=torch.int64)
    data = torch.empty(0, dtype=torch.uint8)
    if dist.get_rank() == 0:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size[0] = data.numel()
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return json.loads(data.numpy().tobytes())


def send_json(value_of_rank: Mapping[int, Any]) -> None:
    """Send some ranks a JSON-able value each, from rank 0; they call ``recv_json``."""
    pending = []
    for rank, value in value_of_rank.items():
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([message.numel()], dtype=torch.int64), dst=rank)
        pending.append((dist.isend(message, dst=rank), message))
    for work, _ in pending:
        work.wait()


def recv_json() -> Any:
    """What rank 0 sends this rank with ``send_json``."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src=0)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, src=0)
    return json.loads(message.numpy().tobytes())


def gather_topologies(topology: RankTopology) -> list[RankTopology]:
    """Every rank's place in the topology, by rank; all ranks get the list."""
    out = []
    for facts in gather_json(asdict(topology)):
        facts["moe_layer_numbers"] = tuple(tuple(c) for c in facts["moe_layer_numbers"])
        out.append(RankTopology(**facts))
    return out


def gather_json(value: Any) -> list[Any]:
    """Every rank's JSON-able value, by rank; all ranks get the list."""
    mine = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, padded)
    return [json.loads(text.numpy().tobytes()) for text in texts]

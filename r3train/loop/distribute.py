"""Send microbatches and slices to the ranks that need them, and small facts between all ranks.

Nothing is pickled: a message is a JSON header and the raw bytes of its arrays, over the host group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from r3train.host_group import host_group
from r3train.layout.microbatch import slice_microbatch
from r3train.types import MicroBatch, RankSlice, RankTopology, TokenLayout

_RECORDS = {record.__name__: record for record in (RankSlice, MicroBatch, TokenLayout)}


def pack_records(records: Sequence[RankSlice | MicroBatch]) -> np.ndarray:
    """Encode records as uint8[bytes]: 8 bytes of header length, the JSON header, the arrays.

    Header and arrays are filled up to a multiple of 8 bytes, so that each begins aligned.  An array lies in
    the message as it does in memory, whatever the order of its axes.
    """
    payload: list[np.ndarray] = []

    def packed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            axes = sorted(range(value.ndim), key=lambda axis: -value.strides[axis])
            laid = np.ascontiguousarray(value.transpose(axes))
            data = laid.view(np.uint8).reshape(-1)
            payload.extend((data, np.zeros(_aligned(data.size) - data.size, dtype=np.uint8)))
            return {"dtype": value.dtype.str, "shape": laid.shape, "axes": axes}
        if is_dataclass(value):
            packed_fields = {f.name: packed(getattr(value, f.name)) for f in fields(value)}
            return {"record": type(value).__name__, "fields": packed_fields}
        if isinstance(value, tuple):
            return {"tuple": [packed(each) for each in value]}
        return value

    text = json.dumps([packed(record) for record in records])
    head = text.ljust(_aligned(len(text))).encode()
    size = np.frombuffer(len(head).to_bytes(8, "little"), dtype=np.uint8)
    return np.concatenate([size, np.frombuffer(head, dtype=np.uint8), *payload])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def unpack_records(message: np.ndarray) -> list[Any]:
    """The inverse of ``pack_records``; the records' arrays are views into ``message``."""
    size = int.from_bytes(message[:8].tobytes(), "little")
    header = json.loads(message[8 : 8 + size].tobytes())
    offset = 8 + size

    def unpacked(entry: Any) -> Any:
        nonlocal offset
        if not isinstance(entry, dict):
            return entry
        if "record" in entry:
            values = {name: unpacked(value) for name, value in entry["fields"].items()}
            return _RECORDS[entry["record"]](**values)
        if "tuple" in entry:
            return tuple(unpacked(each) for each in entry["tuple"])
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        start, num_bytes = offset, dtype.itemsize * int(np.prod(shape))
        offset += _aligned(num_bytes)
        laid = message[start : start + num_bytes].view(dtype).reshape(shape)
        return laid.transpose(np.argsort(entry["axes"]))

    records = [unpacked(entry) for entry in header]
    assert offset == message.shape[0], (offset, message.shape)
    return records


class PendingMessages:
    """Messages being sent; it holds their bytes until ``wait``."""

    def __init__(self, message_of_rank: Mapping[int, np.ndarray]):
        self._pending, group = [], host_group()
        for rank, content in message_of_rank.items():
            message = torch.from_numpy(content)
            dist.send(torch.tensor([message.numel()], dtype=torch.int64), dst=rank, group=group)
            if len(message):
                self._pending.append((dist.isend(message, dst=rank, group=group), message))

    def wait(self) -> None:
        """Return once all messages have been received."""
        for work, _ in self._pending:
            work.wait()


def _received(source: int) -> np.ndarray:
    """A message of ``PendingMessages``: uint8[bytes]."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, src=source, group=host_group())
    message = torch.empty(int(size), dtype=torch.uint8)
    if len(message):
        dist.recv(message, src=source, group=host_group())
    return message.numpy()


def send_records(
    records_of_rank: Mapping[int, Sequence[RankSlice | MicroBatch]]
) -> PendingMessages:
    """Begin to send some ranks records each; they call ``recv_records``."""
    return PendingMessages(
        {rank: pack_records(records) for rank, records in records_of_rank.items()}
    )


def recv_records(source: int) -> list[Any]:
    """Receive the records that another rank sends with ``send_records``."""
    return unpack_records(_received(source))


def send_slices(
    microbatches: Iterable[Mapping[int, MicroBatch]], topologies: Sequence[RankTopology]
) -> list[RankSlice]:
    """Cut microbatches for the ranks that train them, send each rank its own, return this rank's.

    microbatches: turn by turn, one microbatch for each of some data-parallel ranks, by
    data-parallel rank.  Every other rank of those data-parallel ranks calls ``recv_slices``.  At
    most the slices of two turns are held.
    """
    local_slices: list[RankSlice] = []
    before = PendingMessages({})
    for by_data_rank in microbatches:
        slices = {
            t.rank: [slice_microbatch(by_data_rank[t.dp_rank], t)]
            for t in topologies
            if t.dp_rank in by_data_rank
        }
        local_slices += slices.pop(dist.get_rank())
        now = send_records(slices)
        before.wait()
        before = now
    before.wait()
    return local_slices


def recv_slices(source: int, count: int) -> list[RankSlice]:
    """This rank's slices of ``count`` microbatches, which ``source`` cuts with ``send_slices``."""
    return [s for _ in range(count) for s in recv_records(source)]


def distribute_slices(
    microbatches: Sequence[Sequence[MicroBatch]] | None,
    topologies: Sequence[RankTopology],
    count: int,
) -> list[RankSlice]:
    """Cut and send every rank's slices on rank 0; return this rank's ``count``.

    microbatches: [dp][count] on rank 0, None elsewhere.
    """
    if microbatches is None:
        return recv_slices(0, count)
    turns = (dict(enumerate(turn)) for turn in zip(*microbatches, strict=True))
    return send_slices(turns, topologies)


def broadcast_json(value: Any) -> Any:
    """Return rank 0's JSON-able value on every rank."""
    size = torch.zeros(1, dtype=torch.int64)
    data = torch.empty(0, dtype=torch.uint8)
    if dist.get_rank() == 0:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size[0] = data.numel()
    dist.broadcast(size, src=0, group=host_group())
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=host_group())
    return json.loads(data.numpy().tobytes())


def send_json(value_of_rank: Mapping[int, Any]) -> None:
    """Send some ranks a JSON-able value each; they call ``recv_json``."""
    messages = {rank: json.dumps(value).encode() for rank, value in value_of_rank.items()}
    PendingMessages(
        {r: np.frombuffer(bytearray(m), dtype=np.uint8) for r, m in messages.items()}
    ).wait()


def recv_json(source: int = 0) -> Any:
    """Receive the value that a rank sends with ``send_json``."""
    return json.loads(_received(source).tobytes())


def gather_arrays(mine: np.ndarray) -> list[np.ndarray] | None:
    """Gather every rank's flat array, of one dtype, on rank 0 by rank; None on the others."""
    if dist.get_rank() != 0:
        PendingMessages({0: mine.view(np.uint8)}).wait()
        return None
    return [mine, *(_received(r).view(mine.dtype) for r in range(1, dist.get_world_size()))]


def scatter_arrays(arrays: Sequence[np.ndarray] | None, dtype: type) -> np.ndarray:
    """Send every rank its flat array of ``dtype`` from rank 0 (None elsewhere); return this rank's."""
    if arrays is None:
        return _received(0).view(dtype)
    PendingMessages({r: x.view(np.uint8) for r, x in enumerate(arrays) if r}).wait()
    return arrays[0]


def gather_topologies(topology: RankTopology) -> list[RankTopology]:
    """Gather every rank's topology, by rank; all ranks get the list."""
    return [msgspec.convert(facts, RankTopology) for facts in gather_json(asdict(topology))]


def gather_json(value: Any) -> list[Any]:
    """Gather every rank's JSON-able value, by rank; all ranks get the list."""
    mine = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=host_group())
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, padded, group=host_group())
    return [json.loads(text.numpy().tobytes()) for text in texts]

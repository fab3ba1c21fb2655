"""Routes from the stores that keep them to the ranks that replay them (--route-stores).

    rank 0:  samples hold references -> one plan a leader: parts and lengths of its microbatches
    leader:  rows from its own store and from the others' -> a microbatch's routes -> every rank of
             its data-parallel group is sent its rows and layers
    others:  receive theirs

A leader is the rank with tensor, context and pipeline rank 0 of a data-parallel rank; rank 0 is
one.  A microbatch's layout follows from its lengths alone, and the cutting is what rank 0 does
without stores (``layout.microbatch``), so slices are the same either way.

The rollout side of the evidence is computed where the bytes arrived, while the actor trains.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from r3train.layout.microbatch import route_places, slice_routes
from r3train.layout.rows import pack_layout
from r3train.loop.parts import ReplayPlan
from r3train.loop.prepare import Prepared
from r3train.loop.recorded import Recorded
from r3train.loop.route_plan import leader_plans, parts_of
from r3train.loop.scatter import recv_json, send_json
from r3train.types import (
    RankSlice,
    RankTopology,
    RouteRef,
    StoredRows,
    TrainSample,
    missing_marker,
)

# microbatches whose rows are on their way or waiting to be cut: bounds a leader's memory
_AHEAD = 4


class Node(Protocol):
    """``rollout.route_node.RouteNode``, as a leader sees it."""

    index: int
    store: Any
    fetched_bytes: int

    def fetch(self, parts: Sequence[Any], places: Sequence[np.ndarray]) -> Future[None]: ...


class Ledger(Protocol):
    """``rollout.route_relay.RouteLedger``, as rank 0 sees it."""

    def new(self, store: int) -> StoredRows: ...

    def whole(self, rows: StoredRows, count: int) -> RouteRef: ...

    def take_released(self, store: int) -> list[int]: ...


def leader_ranks(topologies: Sequence[RankTopology]) -> list[int]:
    """The leaders' ranks, by data-parallel rank; a leader's store has that index."""
    ranks = {t.dp_rank: t.rank for t in topologies if t.tp_rank == t.cp_rank == t.pp_rank == 0}
    return [ranks[data_rank] for data_rank in range(topologies[0].dp_size)]


@dataclass(frozen=True)
class _Coming:
    """A microbatch whose rows are being fetched."""

    lengths: np.ndarray
    routes: np.ndarray  # [F, L, K]
    fetched: Future[None]


class RouteExchange:
    """One rank's part; ``node`` is None but on leaders, ``ledger`` but on rank 0."""

    def __init__(
        self,
        topologies: Sequence[RankTopology],
        rank: int,
        replay: ReplayPlan,
        *,
        node: Node | None,
        ledger: Ledger | None,
    ) -> None:
        self._topologies = topologies
        self._mine = topologies[rank]
        self._replay = replay
        self._node = node
        self._ledger = ledger
        self._leaders = leader_ranks(topologies)
        self._plan: dict[str, Any] = {}
        self._coming: list[_Coming] = []
        self._recorded: Future[Recorded] | None = None
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="recorded-routes")
        self._in_use: Any = None  # rank 0: what the stores must keep while the step is trained
        self._exchange_s = 0.0
        self._before = {"wire_bytes": 0, "fetched_bytes": 0}

    # -- rank 0 ------------------------------------------------------------------------------

    def adopt(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The samples with references alone: routes that are here (of a resumed buffer, or of
        rollouts without a row) go into this rank's own store."""
        return [self._adopted(s) for s in samples]

    def _adopted(self, s: TrainSample) -> TrainSample:
        routes = s.sample.routed_experts
        if not isinstance(routes, np.ndarray):
            return s
        assert self._node is not None and self._ledger is not None
        rows = self._ledger.new(self._node.index)
        self._node.store.put(rows.key, routes)
        reference = self._ledger.whole(rows, len(routes))
        return replace(s, sample=replace(s.sample, routed_experts=reference))

    # -- all ranks ---------------------------------------------------------------------------

    def start(self, prepared: Prepared | None) -> None:
        """Tell the leaders what to fetch; they begin.  ``prepared`` is None but on rank 0."""
        began = time.monotonic()
        if self._ledger is not None:
            assert prepared is not None
            self._in_use = prepared.samples, prepared.dealt_of_steps
            recorded = prepared.samples if self._replay.check else []
            plans = leader_plans(recorded, prepared.dealt_of_steps, self._replay)
            for store, plan in enumerate(plans):
                plan["release"] = self._ledger.take_released(store)
            send_json({rank: plans[i] for i, rank in enumerate(self._leaders) if rank})
            self._plan = plans[0]
        elif self._node is not None:
            self._plan = recv_json()
        if self._node is not None:
            self._node.store.release(self._plan["release"])
            self._recorded = self._recorder.submit(self._record, self._plan["recorded"])
            self._coming = []
            self._fetch_ahead(0)
        self._exchange_s = time.monotonic() - began

    def _fetch_ahead(self, done: int) -> None:
        """Keep ``_AHEAD`` microbatches beyond those ``done`` on their way."""
        planned = self._plan["microbatches"]
        while len(self._coming) < min(done + _AHEAD, len(planned)):
            plan = planned[len(self._coming)]
            lengths = np.array(plan["lengths"], dtype=np.int32)
            shape = self._replay.num_layers, self._replay.topk
            routes, places = route_places(lengths, shape, self._replay.route_dtype)
            missing = missing_marker(routes.dtype)
            parts, targets = [], []
            for sample, first, part in parts_of(plan):
                target = places[sample][first : first + part[3] - part[2]]
                if part[0] < 0:
                    target[:] = missing
                else:
                    parts.append(part)
                    targets.append(target)
            self._coming.append(_Coming(lengths, routes, self._node.fetch(parts, targets)))

    def finish(self, slices: Sequence[RankSlice]) -> list[RankSlice]:
        """This rank's slices with their routes; the leader cuts and sends, the others receive."""
        began = time.monotonic()
        if self._node is None:
            out = [self._received(s) for s in slices]
        else:
            out = self._cut_for_all(slices)
        self._exchange_s += time.monotonic() - began
        return out

    def _received(self, s: RankSlice) -> RankSlice:
        dtype = np.dtype(self._replay.route_dtype)
        shape = len(s.route_uids), len(s.layer_numbers), self._replay.topk
        raw = torch.empty(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8)
        if raw.numel():
            dist.recv(raw, src=self._leaders[self._mine.dp_rank])
        return replace(s, routes=raw.numpy().view(dtype).reshape(shape))

    def _cut_for_all(self, slices: Sequence[RankSlice]) -> list[RankSlice]:
        some = self._mine
        tp_size = some.tp_size if some.sequence_parallel else 1
        group = [t for t in self._topologies if t.dp_rank == some.dp_rank]
        out: list[RankSlice] = []
        pending: list[tuple[Any, torch.Tensor]] = []
        assert len(slices) == len(self._plan["microbatches"]), "the plan is of other microbatches"
        for i, s in enumerate(slices):
            coming = self._coming[i]
            coming.fetched.result()
            layout = pack_layout(coming.lengths, cp_size=some.cp_size, tp_size=tp_size)
            sent = []
            for t in group:
                own = np.ascontiguousarray(slice_routes(coming.routes, layout, t))
                if t.rank == some.rank:
                    out.append(replace(s, routes=own))
                elif own.size:
                    message = torch.from_numpy(own.reshape(-1).view(np.uint8))
                    sent.append((dist.isend(message, dst=t.rank), message))
            for work, _ in pending:  # the last microbatch's bytes are held no longer than this one
                work.wait()
            pending = sent
            self._coming[i] = None  # type: ignore[call-overload]
            self._fetch_ahead(i + 1)
        for work, _ in pending:
            work.wait()
        return out

    # -- evidence ----------------------------------------------------------------------------

    def _record(self, planned: Sequence[Sequence[int]]) -> Recorded:
        recorded = Recorded(len(self._leaders), self._replay.moe_layers)
        for data_rank, sample_id, position, key, start, stop in planned:
            rows = self._node.store.rows(key, start, stop)
            recorded.add(data_rank, sample_id, rows, first_position=position)
        return recorded

    def recorded(self) -> Recorded:
        """What the rollout recorded, over all stores; a collective."""
        own = Recorded(len(self._leaders), self._replay.moe_layers)
        if self._recorded is not None:
            own = self._recorded.result()
        table = torch.from_numpy(own.table())
        dist.all_reduce(table)
        return Recorded.of_table(table.numpy(), self._replay.moe_layers)

    def metrics(self) -> dict[str, Any]:
        """The step's traffic, the largest of any leader; a collective."""
        values = [0, 0, 0]
        if self._node is not None:
            counts = {**self._node.store.counts(), "fetched_bytes": self._node.fetched_bytes}
            since = [counts[name] - self._before[name] for name in self._before]
            self._before = {name: counts[name] for name in self._before}
            values = [counts["held_bytes"], *since]
        largest = torch.tensor([*values, self._exchange_s], dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        held, wire, fetched, exchange_s = largest.tolist()
        return {
            "perf/route_store_held_bytes_max": int(held),
            "perf/route_store_wire_bytes_max": int(wire),
            "perf/route_store_fetched_bytes_max": int(fetched),
            "perf/route_exchange_s": exchange_s,
        }

    def close(self) -> None:
        """End the recorder's thread. Idempotent."""
        self._recorder.shutdown(wait=False, cancel_futures=True)

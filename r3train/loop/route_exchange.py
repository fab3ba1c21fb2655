"""Microbatches to the ranks that train them where stores keep their routes (--route-stores).

    rank 0:  samples hold references -> every leader gets its plan (which rows its microbatches are
             of, and where they lie) and its microbatches, all but the routes
    leader:  rows from its own store and from the others' -> whole microbatches -> every rank of its
             data-parallel group is sent its slices
    others:  receive theirs

A leader is the rank with tensor, context and pipeline rank 0 of a data-parallel rank; rank 0 is
one.  What a leader does for its group is what rank 0 does for all ranks without stores
(``scatter.send_slices``), so slices are the same either way.

The rollout side of the evidence is computed where the bytes arrived, while the actor trains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from r3train.config.hf_facts import HfModelFacts
from r3train.layout.microbatch import route_places
from r3train.loop.prepare import Prepared
from r3train.loop.recorded import Recorded
from r3train.loop.route_plan import leader_plans, parts_of
from r3train.loop.scatter import (
    recv_json,
    recv_records,
    recv_slices,
    send_json,
    send_records,
    send_slices,
)
from r3train.types import (
    MicroBatch,
    RankSlice,
    RankTopology,
    RouteRef,
    StoredRows,
    TrainSample,
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
    """The routes of a microbatch, being fetched."""

    routes: np.ndarray  # [F, L, K]
    fetched: Future[None]


class RouteExchange:
    """One rank's part; ``node`` is None but on leaders, ``ledger`` but on rank 0."""

    def __init__(
        self,
        topologies: Sequence[RankTopology],
        rank: int,
        hf: HfModelFacts,
        *,
        node: Node | None,
        ledger: Ledger | None,
    ) -> None:
        self._topologies = topologies
        self._mine = topologies[rank]
        self._hf = hf
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

    def scatter(self, prepared: Prepared | None, count: int) -> list[RankSlice]:
        """This rank's slices of a rollout's ``count`` microbatches; a collective.

        prepared: None but on rank 0.
        """
        began = time.monotonic()
        if self._node is None:
            slices = recv_slices(self._leaders[self._mine.dp_rank], count)
        else:
            microbatches = self._begin(prepared)
            assert len(microbatches) == count, "a leader's microbatches are of another rollout"
            slices = send_slices(self._whole(microbatches), self._topologies)
        self._exchange_s = time.monotonic() - began
        return slices

    def _begin(self, prepared: Prepared | None) -> list[MicroBatch]:
        """A leader: begin to fetch; returns its microbatches, whose routes are on their way."""
        if self._ledger is None:
            self._follow(recv_json())
            return recv_records(0)
        assert prepared is not None
        self._in_use = prepared.samples, prepared.steps
        recorded = prepared.samples if prepared.expected is not None else []
        plans = leader_plans(recorded, prepared.steps, self._hf.route_shape)
        for store, plan in enumerate(plans):
            plan["release"] = self._ledger.take_released(store)
        others = [(i, rank) for i, rank in enumerate(self._leaders) if rank]
        send_json({rank: plans[i] for i, rank in others})
        self._follow(plans[0])
        send_records({rank: prepared.microbatches[i] for i, rank in others}).wait()
        return prepared.microbatches[0]

    def _follow(self, plan: dict[str, Any]) -> None:
        """Free what is not wanted any more, begin to take fingerprints, begin to fetch."""
        self._plan, self._coming = plan, []
        self._node.store.release(plan["release"])
        self._recorded = self._recorder.submit(self._record, plan["recorded"])
        self._fetch_ahead(0)

    def _fetch_ahead(self, done: int) -> None:
        """Keep ``_AHEAD`` microbatches beyond those ``done`` on their way."""
        planned = self._plan["microbatches"]
        while len(self._coming) < min(done + _AHEAD, len(planned)):
            plan = planned[len(self._coming)]
            lengths = np.array(plan["lengths"], dtype=np.int32)
            routes, places = route_places(lengths, self._hf.route_shape)
            parts, targets = [], []
            for sample, first, part in parts_of(plan):
                target = places[sample][first : first + part[3] - part[2]]
                if part[0] < 0:
                    target[:] = self._hf.route_shape.missing
                else:
                    parts.append(part)
                    targets.append(target)
            self._coming.append(_Coming(routes, self._node.fetch(parts, targets)))

    def _whole(self, microbatches: Sequence[MicroBatch]) -> Iterator[dict[int, MicroBatch]]:
        """A leader's microbatches in turn, each with its routes once they have come."""
        for i, microbatch in enumerate(microbatches):
            coming = self._coming[i]
            coming.fetched.result()
            yield {self._mine.dp_rank: replace(microbatch, routes=coming.routes)}
            self._coming[i] = None  # type: ignore[call-overload]
            self._fetch_ahead(i + 1)

    # -- evidence ----------------------------------------------------------------------------

    def _record(self, planned: Sequence[Sequence[int]]) -> Recorded:
        recorded = Recorded(len(self._leaders), self._hf.moe_layer_numbers)
        for data_rank, sample_id, position, key, start, stop in planned:
            rows = self._node.store.rows(key, start, stop)
            recorded.add(data_rank, sample_id, rows, first_position=position)
        return recorded

    def recorded(self) -> Recorded:
        """What the rollout recorded, over all stores; a collective."""
        own = Recorded(len(self._leaders), self._hf.moe_layer_numbers)
        if self._recorded is not None:
            own = self._recorded.result()
        table = torch.from_numpy(own.table())
        dist.all_reduce(table)
        return Recorded.of_table(table.numpy(), self._hf.moe_layer_numbers)

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

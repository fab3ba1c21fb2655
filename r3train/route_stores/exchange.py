"""Bring microbatches to the ranks that train them, and replace tickets by rows on the way.

    rank 0:  sends every leader its microbatches, which hold tickets
    leader:  fetches their rows from the stores, and sends every rank of its data-parallel group its
             slices, as rank 0 does for all ranks without stores
    others:  receive theirs

A leader is the rank with tensor, context and pipeline rank 0 of a data-parallel rank; rank 0 is
one.  The recorded totals of the evidence are computed in the stores, while the actor trains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3train.host_group import host_group
from r3train.loop.prepare import Prepared, data_rank_of_samples
from r3train.loop.recorded import Recorded, decoded_rows
from r3train.loop.scatter import (
    recv_json,
    recv_records,
    recv_slices,
    send_json,
    send_records,
    send_slices,
)
from r3train.route_stores.node import RouteNode
from r3train.route_stores.relay import Keys
from r3train.route_stores.tickets import runs
from r3train.types import MicroBatch, RankSlice, RankTopology

# microbatches whose rows are on their way or waiting to be cut: bounds a leader's memory
_AHEAD = 4


def leader_ranks(topologies: Sequence[RankTopology]) -> list[int]:
    """The leaders' ranks, by data-parallel rank; a leader's store has that index."""
    ranks = {t.dp_rank: t.rank for t in topologies if t.tp_rank == t.cp_rank == t.pp_rank == 0}
    return [ranks[data_rank] for data_rank in range(topologies[0].dp_size)]


class RouteExchange:
    """One rank's part in it; only leaders have a ``node``, only rank 0 has ``keys``."""

    def __init__(
        self,
        topologies: Sequence[RankTopology],
        rank: int,
        moe_layers: Sequence[int],
        *,
        node: RouteNode | None,
        keys: Keys | None,
    ) -> None:
        self._topologies = topologies
        self._mine = topologies[rank]
        self._moe_layers = moe_layers
        self._node = node
        self._keys = keys
        self._leaders = leader_ranks(topologies)
        self._recorded: Future[Recorded] | None = None
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="recorded-routes")
        self._exchange_s = 0.0
        self._before = {"wire_bytes": 0, "fetched_bytes": 0}

    def slices(self, prepared: Prepared | None, count: int) -> list[RankSlice]:
        """This rank's slices of a rollout's ``count`` microbatches; a collective.

        prepared: the rollout on rank 0, None elsewhere.
        """
        began = time.monotonic()
        if self._node is None:
            slices = recv_slices(self._leaders[self._mine.dp_rank], count)
        else:
            microbatches = self._own_microbatches(prepared)
            assert len(microbatches) == count, "a leader's microbatches are of another rollout"
            slices = send_slices(self._with_rows(microbatches), self._topologies)
        self._exchange_s = time.monotonic() - began
        return slices

    def _own_microbatches(self, prepared: Prepared | None) -> list[MicroBatch]:
        """A leader's microbatches, with tickets; its store first follows rank 0's plan."""
        if self._keys is None:
            self._follow(recv_json())
            return recv_records(0)
        assert prepared is not None
        for s in prepared.samples:
            self._keys.ended(s.sample.group_id)
        released = self._keys.take_released()
        plans = [
            {"release": keys, "recorded": recorded}
            for keys, recorded in zip(released, self._kept_rows(prepared), strict=True)
        ]
        others = [(i, rank) for i, rank in enumerate(self._leaders) if rank]
        send_json({rank: plans[i] for i, rank in others})
        self._follow(plans[0])
        send_records({rank: prepared.microbatches[i] for i, rank in others}).wait()
        return prepared.microbatches[0]

    def _kept_rows(self, prepared: Prepared) -> list[list[list[int]]]:
        """By store: [data rank, sample id, position, key, start, stop] of the rollout's rows."""
        by_store: list[list[list[int]]] = [[] for _ in self._leaders]
        data_rank_of = data_rank_of_samples(prepared.steps)
        for s in prepared.samples if prepared.expectation is not None else ():
            sample_id = s.sample.sample_id
            # a sample that nobody trains is counted too, so that the check finds it missing
            data_rank = data_rank_of.get(sample_id, 0)
            for position, rows in decoded_rows(s.sample):
                for first, key, start, stop in runs(rows):
                    if key is not None:
                        row = [data_rank, sample_id, position + first, key, start, stop]
                        by_store[key % len(self._leaders)].append(row)
        return by_store

    def _follow(self, plan: dict[str, Any]) -> None:
        """Free the released rows, and begin to add up the recorded rows of this rollout."""
        self._node.store.release(plan["release"])
        self._recorded = self._recorder.submit(self._record, plan["recorded"])

    def _with_rows(self, microbatches: Sequence[MicroBatch]) -> Iterator[dict[int, MicroBatch]]:
        """A leader's microbatches in turn, each with its routes once they have come."""
        tickets = [np.concatenate(m.routes) for m in microbatches]
        coming = deque(self._node.fetch(t) for t in tickets[:_AHEAD])
        for i, microbatch in enumerate(microbatches):
            routes, fetched = coming.popleft()
            fetched.result()
            yield {self._mine.dp_rank: replace(microbatch, routes=(routes,))}
            coming += [self._node.fetch(t) for t in tickets[i + _AHEAD :][:1]]

    def _record(self, kept: Sequence[Sequence[int]]) -> Recorded:
        recorded = Recorded(len(self._leaders), self._moe_layers)
        for data_rank, sample_id, position, key, start, stop in kept:
            rows = self._node.store.rows(key, start, stop)
            recorded.add(data_rank, sample_id, rows, first_position=position)
        return recorded

    def recorded(self) -> Recorded:
        """The recorded totals of all stores, on all ranks; a collective."""
        own = Recorded(len(self._leaders), self._moe_layers)
        if self._recorded is not None:
            own = self._recorded.result()
        dist.all_reduce(torch.from_numpy(own.table), group=host_group())
        return own

    def metrics(self) -> dict[str, Any]:
        """The step's traffic, the largest of any leader; a collective."""
        values = [0, 0, 0]
        if self._node is not None:
            counts = {**self._node.store.counts(), "fetched_bytes": self._node.fetched_bytes}
            since = [counts[name] - self._before[name] for name in self._before]
            self._before = {name: counts[name] for name in self._before}
            values = [counts["held_bytes"], *since]
        largest = torch.tensor([*values, self._exchange_s], dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=host_group())
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

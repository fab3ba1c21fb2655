"""The route stores of a job (--route-stores): microbatches whose handles become rows on the way to their ranks.

    rank 0:  sends every leader its microbatches, which hold handles
    leader:  fetches their rows from the stores, and sends every rank of its data-parallel group its
             slices, as rank 0 does for all ranks without stores
    others:  receive theirs

A leader is the rank with tensor, context and pipeline rank 0 of a data-parallel rank; rank 0 is
one.  The recorded totals of the evidence are computed in the stores, while the actor trains.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from r3train.config import RunConfig
from r3train.engine.addresses import ANY, LOOPBACK, address_of_interface, is_loopback, local_address
from r3train.engine.sglang_http import HTTPSettings, SGLangHTTP
from r3train.host_group import host_group, one_node
from r3train.loop.prepare import Prepared, data_rank_of_samples
from r3train.loop.recorded import Recorded, decoded_rows
from r3train.loop.route_transport import Routes
from r3train.loop.distribute import (
    broadcast_json,
    gather_json,
    gather_topologies,
    recv_json,
    recv_records,
    recv_slices,
    send_json,
    send_records,
    send_slices,
)
from r3train.route_stores import handles
from r3train.route_stores.node import RouteNode
from r3train.route_stores.relay import Keys, RouteRelay
from r3train.types import MicroBatch, RankSlice, RankTopology, RolloutSample, RouteShape

logger = logging.getLogger(__name__)

# microbatches whose rows are on their way or waiting to be cut: bounds a leader's memory
_AHEAD = 4


def leader_ranks(topologies: Sequence[RankTopology]) -> list[int]:
    """The leaders' ranks, by data-parallel rank; a leader's store has that index."""
    ranks = {t.dp_rank: t.rank for t in topologies if t.tp_rank == t.cp_rank == t.pp_rank == 0}
    return [ranks[data_rank] for data_rank in range(topologies[0].dp_size)]


class RouteStores(Routes):
    """One rank's part: only leaders have a ``node``, only rank 0 has ``keys``.

    Raises ValueError if leaders could not reach the servers.
    """

    row_shape = handles.HANDLES
    node: RouteNode | None = None
    keys: Keys | None = None

    def __init__(self, config: RunConfig, routes: RouteShape, moe_layers: Sequence[int]) -> None:
        check_servers_host(
            config.rollout.sglang.get("host"),
            local_servers=not config.rollout.has_external_servers,
            environ=os.environ,
        )
        self._named_host = config.replay.route_store_host
        self._routes = routes
        self._moe_layers = moe_layers
        self._recorded: Future[Recorded] | None = None
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="recorded-routes")
        self._exchange_s = 0.0
        self._counted = np.zeros(2, np.int64)  # bytes of answers and of other stores' rows so far

    def open(self, topology: RankTopology) -> None:
        """Start the leaders' stores and make them known to one another; a collective.

        Raises ValueError, on all ranks, naming those that cannot bind their address, or cannot
        reach another store.
        """
        self._topology, self._topologies = topology, gather_topologies(topology)
        self._leaders = leader_ranks(self._topologies)
        # the ranks of this job alone know the token, and no file holds it
        self._token = broadcast_json(secrets.token_hex(32) if topology.rank == 0 else None)
        bind, address = bound_and_known(self._named_host, os.environ)
        report: dict[str, object] = {}
        if topology.rank in self._leaders:
            self.node = RouteNode(topology.dp_rank, self._token, self._routes, bind)
            try:
                report["url"] = _url(address, self.node.start())
            except OSError as error:
                report["error"] = f"rank {topology.rank} cannot bind {bind}: {error}"
        everybody = gather_json(report)
        _raise_first([entry["error"] for entry in everybody if "error" in entry])
        self._urls = [everybody[rank]["url"] for rank in self._leaders]
        unreached: list[str] = []
        if self.node is not None:
            self.node.connect(self._urls)
            unreached = [f"rank {topology.rank}: {failure}" for failure in self.node.reach()]
        _raise_first(sum(gather_json(unreached), []))
        if topology.rank == 0:
            logger.info("route stores: %s", ", ".join(self._urls))
            self.keys = Keys(len(self._leaders))

    def transport(self) -> RouteRelay:
        """Make rank 0's transport through the stores, in the event loop that will use it."""
        return RouteRelay(self._urls, self._token, self.keys)

    def require_reach(self, addrs: Sequence[str], api_key: str | None) -> None:
        """Raise ValueError naming a store that cannot talk to a server; on rank 0."""

        async def ask() -> None:
            relay = self.transport()
            http = SGLangHTTP(addrs, HTTPSettings(api_key=api_key))
            try:
                await relay.require_reach(http)
            finally:
                await relay.aclose()
                await http.aclose()

        self.node.submit(ask).result()

    def keep(self, sample: RolloutSample) -> RolloutSample:
        """Put the sample's routes into rank 0's own store; return the sample with handles."""
        routes = sample.routed_experts
        if routes is None:  # never answered
            return sample
        key = self.keys.new(sample.group_id, self.node.index)
        self.node.store.put(key, routes)
        return replace(sample, routed_experts=handles.issue(key, len(routes)))

    def read(self, sample: RolloutSample) -> RolloutSample:
        """Return the sample with its routes, fetched from their stores."""
        if sample.routed_experts is None:  # never answered
            return sample
        routes, fetched = self.node.fetch(sample.routed_experts)
        fetched.result()
        return replace(sample, routed_experts=routes)

    def ended(self, group_id: int) -> None:
        """Let the stores free the group's rows."""
        self.keys.ended(group_id)

    def slices(self, prepared: Prepared | None, count: int) -> list[RankSlice]:
        """This rank's slices, cut by its leader; a collective."""
        began = time.monotonic()
        if self.node is None:
            slices = recv_slices(self._leaders[self._topology.dp_rank], count)
        else:
            microbatches = self._leader_microbatches(prepared)
            assert len(microbatches) == count, "a leader's microbatches are of another rollout"
            slices = send_slices(self._with_rows(microbatches), self._topologies)
        self._exchange_s = time.monotonic() - began
        return slices

    def _leader_microbatches(self, prepared: Prepared | None) -> list[MicroBatch]:
        """A leader's microbatches, with handles; its store first follows rank 0's plan."""
        if self.keys is None:
            self._follow(recv_json())
            return recv_records(0)
        assert prepared is not None
        for s in prepared.samples:
            self.keys.ended(s.sample.group_id)
        released = self.keys.take_released()
        plans = [
            {"release": keys, "recorded": recorded}
            for keys, recorded in zip(released, self._kept_rows(prepared), strict=True)
        ]
        stores = [(i, rank) for i, rank in enumerate(self._leaders) if rank]
        send_json({rank: plans[i] for i, rank in stores})
        self._follow(plans[0])
        send_records({rank: prepared.microbatches[i] for i, rank in stores}).wait()
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
                for first, key, start, stop in handles.runs(rows):
                    if key is not None:
                        row = [data_rank, sample_id, position + first, key, start, stop]
                        by_store[key % len(self._leaders)].append(row)
        return by_store

    def _follow(self, plan: dict[str, Any]) -> None:
        """Free the released rows, and begin to add up the recorded rows of this rollout."""
        self.node.store.release(plan["release"])
        self._recorded = self._recorder.submit(self._record, plan["recorded"])

    def _with_rows(self, microbatches: Sequence[MicroBatch]) -> Iterator[dict[int, MicroBatch]]:
        """A leader's microbatches in turn, each with its routes once they have come."""
        rows = [np.concatenate(m.routes) for m in microbatches]
        coming = deque(self.node.fetch(r) for r in rows[:_AHEAD])
        for i, microbatch in enumerate(microbatches):
            routes, fetched = coming.popleft()
            fetched.result()
            yield {self._topology.dp_rank: replace(microbatch, routes=(routes,))}
            coming += [self.node.fetch(r) for r in rows[i + _AHEAD :][:1]]

    def _record(self, kept: Sequence[Sequence[int]]) -> Recorded:
        recorded = Recorded(len(self._leaders), self._moe_layers)
        for data_rank, sample_id, position, key, start, stop in kept:
            rows = self.node.store.rows(key, start, stop)
            recorded.add(data_rank, [(sample_id, rows, position)])
        return recorded

    def recorded(self, prepared: Prepared | None) -> Recorded:
        """The recorded totals of all stores, on all ranks; a collective."""
        totals = Recorded(len(self._leaders), self._moe_layers)
        if self._recorded is not None:
            totals = self._recorded.result()
        dist.all_reduce(torch.from_numpy(totals.table), group=host_group())
        return totals

    def metrics(self) -> dict[str, Any]:
        """The step's traffic, the largest of any leader; a collective."""
        values = [0, 0, 0]
        if self.node is not None:
            store, before = self.node.store, self._counted
            self._counted = np.array([store.wire_bytes, self.node.fetched_bytes])
            values = [store.held_bytes, *(self._counted - before)]
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
        """End this rank's store. Idempotent."""
        self._recorder.shutdown(wait=False, cancel_futures=True)
        if self.node is not None:
            self.node.close()


def _raise_first(errors: Sequence[str]) -> None:
    """Raise ValueError with the first error and the number of the others."""
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(
            f"--route-stores: {errors[0]}{more}; --route-store-host takes an address or a network"
            " interface by which the leaders' nodes reach one another"
        )


def bound_and_known(
    named: str | None, environ: Mapping[str, str], gather: Callable[[str], list[str]] = gather_json
) -> tuple[str, str]:
    """Return the address to bind, and the address by which other ranks reach it; a collective.

    named: --route-store-host; environ: torchrun's; gather: every rank's text, on all ranks.
    Without ``named`` it is loopback if all ranks are on one node, else the address that a
    connection to the rendezvous would use.  If that is loopback (the rendezvous is here), another
    node takes its place.
    """
    local = LOOPBACK if one_node(environ) else local_address(environ["MASTER_ADDR"])
    for other in gather(local):
        if is_loopback(local) and not is_loopback(other):
            local = local_address(other)
    if named is None:
        return local, local
    named = address_of_interface(named) or named
    return named, local if named in ANY else named


def check_servers_host(host: object, *, local_servers: bool, environ: Mapping[str, str]) -> None:
    """Raise ValueError if leaders on other nodes cannot reach this job's local servers.

    host: sglang.host, None when it is not given.
    """
    if local_servers and not one_node(environ) and (host in (None, *ANY) or is_loopback(str(host))):
        raise ValueError(
            f"--route-stores over several nodes: sglang.host is {host or LOOPBACK!r}, and leaders"
            " on other nodes cannot reach a server there; give an address of rank 0's node"
            " (--sglang-host)"
        )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

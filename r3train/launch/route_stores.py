"""The route stores of a job (--route-stores), built together by all ranks."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence

from r3train.launch.job import Job, replay_plan
from r3train.loop.route_exchange import RouteExchange, leader_ranks
from r3train.loop.scatter import broadcast_json, gather_json, gather_topologies
from r3train.rollout.route_node import RouteNode
from r3train.rollout.route_relay import RouteLedger, RouteRelay
from r3train.rollout.sglang_answer import ExpectedRoutes
from r3train.rollout.sglang_http import SGLangHTTP
from r3train.types import RankTopology

_LOOPBACK = "127.0.0.1"
_ANY = ("0.0.0.0", "::")


class RouteStores:
    """One rank's part: its store if it leads a data-parallel rank, and its side of the exchange."""

    def __init__(self, job: Job):
        self._job = job
        self._node: RouteNode | None = None
        self._exchange: RouteExchange | None = None
        self._urls: list[str] = []
        self._token = ""
        self._ledger: RouteLedger | None = None

    def open(self, topology: RankTopology) -> RouteExchange:
        """Start the leaders' stores and make them known to one another; a collective.

        Raises ValueError, on all ranks, naming those that cannot bind their address.
        """
        hf, replay = self._job.hf, replay_plan(self._job)
        assert replay is not None, "checked before the start"
        routes = ExpectedRoutes(hf.num_hidden_layers, hf.num_experts_per_tok, hf.num_experts)
        topologies = gather_topologies(topology)
        leaders = leader_ranks(topologies)
        # known to the ranks of this job alone, and written nowhere
        self._token = broadcast_json(secrets.token_hex(32) if topology.rank == 0 else None)
        bind, address = store_host(self._job.config.replay.route_store_host, os.environ)
        mine: dict[str, object] = {}
        if topology.rank in leaders:
            self._node = RouteNode(topology.dp_rank, self._token, routes, bind)
            try:
                mine["url"] = _url(address, self._node.start())
            except OSError as error:
                mine["error"] = f"rank {topology.rank} cannot bind {bind}: {error}"
        everybody = gather_json(mine)
        errors = [entry["error"] for entry in everybody if "error" in entry]
        if errors:
            raise ValueError(f"--route-stores: {'; '.join(errors)} (route_store_host)")
        self._urls = [everybody[rank]["url"] for rank in leaders]
        if self._node is not None:
            self._node.connect(self._urls)
        if topology.rank == 0:
            assert self._node is not None
            self._ledger = RouteLedger(len(leaders), self._node.read, routes)
        self._exchange = RouteExchange(
            topologies, topology.rank, replay, node=self._node, ledger=self._ledger
        )
        return self._exchange

    def relay(self) -> RouteRelay:
        """Rank 0's way through the stores; call it in the event loop that will use it."""
        assert self._ledger is not None, "open the stores first"
        return RouteRelay(self._urls, self._token, self._ledger)

    def require_reach(self, addrs: Sequence[str], api_key: str | None) -> None:
        """Raise ValueError naming a store that cannot talk to a server; on rank 0."""
        assert self._node is not None

        async def ask() -> None:
            relay, http = self.relay(), SGLangHTTP(addrs, api_key=api_key)
            try:
                await relay.require_reach(http)
            finally:
                await relay.aclose()
                await http.aclose()

        self._node.submit(ask).result()

    def close(self) -> None:
        """End this rank's store. Idempotent."""
        if self._exchange is not None:
            self._exchange.close()
        if self._node is not None:
            self._node.close()


def store_host(asked: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The address to bind, and the one that other ranks reach it by.

    asked: --route-store-host; environ: torchrun's.  Unset means loopback where all ranks are on one
    node, else the address by which this node reaches the rendezvous.
    """
    one_node = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if asked is not None and asked not in _ANY:
        return asked, asked
    own = _LOOPBACK if one_node else _own_address(environ["MASTER_ADDR"])
    return asked or own, own


def _own_address(peer: str) -> str:
    """This node's address on the way to a peer; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

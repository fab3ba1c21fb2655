"""The route stores of a job (--route-stores), built together by all ranks."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from r3train.config import RunConfig
from r3train.engine.addresses import ANY, LOOPBACK, address_of_interface, is_loopback, own_address
from r3train.engine.http import SGLangHTTP
from r3train.loop.prepare import Prepared
from r3train.loop.recorded import Recorded
from r3train.loop.routes import Routes
from r3train.loop.scatter import broadcast_json, gather_json, gather_topologies
from r3train.route_stores import tickets
from r3train.route_stores.exchange import RouteExchange, leader_ranks
from r3train.route_stores.node import RouteNode
from r3train.route_stores.relay import Keys, RouteRelay
from r3train.types import RankSlice, RankTopology, RolloutSample, RouteShape

logger = logging.getLogger(__name__)


class RouteStores(Routes):
    """One rank's part: its store if it leads a data-parallel rank.

    Raises ValueError if leaders could not reach the servers.
    """

    row_shape = tickets.TICKETS

    def __init__(self, config: RunConfig, routes: RouteShape, moe_layers: Sequence[int]) -> None:
        check_servers_host(
            config.rollout.sglang.get("host"),
            own_servers=not config.rollout.rollout_external_engine_addrs,
            environ=os.environ,
        )
        self._asked_host = config.replay.route_store_host
        self._routes = routes
        self._moe_layers = moe_layers
        self._node: RouteNode | None = None
        self._exchange: RouteExchange | None = None
        self._urls: list[str] = []
        self._token = ""
        self._keys: Keys | None = None

    def open(self, topology: RankTopology) -> None:
        """Start the leaders' stores and make them known to one another; a collective.

        Raises ValueError, on all ranks, naming those that cannot bind their address, or cannot
        reach another store.
        """
        topologies = gather_topologies(topology)
        leaders = leader_ranks(topologies)
        # the ranks of this job alone know the token, and no file holds it
        self._token = broadcast_json(secrets.token_hex(32) if topology.rank == 0 else None)
        bind, address = bound_and_known(self._asked_host, os.environ)
        mine: dict[str, object] = {}
        if topology.rank in leaders:
            self._node = RouteNode(topology.dp_rank, self._token, self._routes, bind)
            try:
                mine["url"] = _url(address, self._node.start())
            except OSError as error:
                mine["error"] = f"rank {topology.rank} cannot bind {bind}: {error}"
        everybody = gather_json(mine)
        _raise_first([entry["error"] for entry in everybody if "error" in entry])
        self._urls = [everybody[rank]["url"] for rank in leaders]
        unreached: list[str] = []
        if self._node is not None:
            self._node.connect(self._urls)
            unreached = [f"rank {topology.rank}: {failure}" for failure in self._node.reach()]
        _raise_first(sum(gather_json(unreached), []))
        if topology.rank == 0:
            logger.info("route stores: %s", ", ".join(self._urls))
            self._keys = Keys(len(leaders))
        self._exchange = RouteExchange(
            topologies, topology.rank, self._moe_layers, node=self._node, keys=self._keys
        )

    def transport(self) -> RouteRelay:
        """Make rank 0's transport through the stores, in the event loop that will use it."""
        assert self._keys is not None, "open the stores first"
        return RouteRelay(self._urls, self._token, self._keys)

    def require_reach(self, addrs: Sequence[str], api_key: str | None) -> None:
        """Raise ValueError naming a store that cannot talk to a server; on rank 0."""
        assert self._node is not None

        async def ask() -> None:
            relay, http = self.transport(), SGLangHTTP(addrs, api_key=api_key)
            try:
                await relay.require_reach(http)
            finally:
                await relay.aclose()
                await http.aclose()

        self._node.submit(ask).result()

    def keep(self, sample: RolloutSample) -> RolloutSample:
        """Put the sample's routes into rank 0's own store; return the sample with tickets."""
        assert self._node is not None and self._keys is not None
        routes = sample.routed_experts
        if routes is None:  # never answered
            return sample
        key = self._keys.new(sample.group_id, self._node.index)
        self._node.store.put(key, routes)
        return replace(sample, routed_experts=tickets.issue(key, len(routes)))

    def read(self, sample: RolloutSample) -> RolloutSample:
        """Return the sample with its routes, fetched from their stores."""
        assert self._node is not None
        if sample.routed_experts is None:  # never answered
            return sample
        routes, fetched = self._node.fetch(sample.routed_experts)
        fetched.result()
        return replace(sample, routed_experts=routes)

    def ended(self, group_id: int) -> None:
        """Let the stores free the group's rows."""
        assert self._keys is not None
        self._keys.ended(group_id)

    def slices(self, prepared: Prepared | None, count: int) -> list[RankSlice]:
        """This rank's slices, cut by its leader; a collective."""
        assert self._exchange is not None
        return self._exchange.slices(prepared, count)

    def recorded(self, prepared: Prepared | None) -> Recorded:
        """The recorded totals of all stores; a collective."""
        assert self._exchange is not None
        return self._exchange.recorded()

    def metrics(self) -> dict[str, Any]:
        """The step's traffic, the largest of any leader; a collective."""
        assert self._exchange is not None
        return self._exchange.metrics()

    def close(self) -> None:
        """End this rank's store. Idempotent."""
        if self._exchange is not None:
            self._exchange.close()
        if self._node is not None:
            self._node.close()


def _raise_first(errors: Sequence[str]) -> None:
    """Raise ValueError with the first error and the number of the others."""
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(
            f"--route-stores: {errors[0]}{more}; --route-store-host takes an address or a network"
            " interface by which the leaders' nodes reach one another"
        )


def bound_and_known(
    asked: str | None, environ: Mapping[str, str], gather: Callable[[str], list[str]] = gather_json
) -> tuple[str, str]:
    """Return the address to bind, and the address by which other ranks reach it; a collective.

    asked: --route-store-host; environ: torchrun's; gather: every rank's text, on all ranks.
    Without ``asked`` it is loopback if all ranks are on one node, else the address that a
    connection to the rendezvous would use.  If that is loopback (the rendezvous is here), another
    node takes its place.
    """
    own = LOOPBACK if one_node(environ) else own_address(environ["MASTER_ADDR"])
    for other in gather(own):
        if is_loopback(own) and not is_loopback(other):
            own = own_address(other)
    if asked is None:
        return own, own
    asked = address_of_interface(asked) or asked
    return asked, own if asked in ANY else asked


def one_node(environ: Mapping[str, str]) -> bool:
    """True if torchrun runs all ranks on this node."""
    return environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")


def check_servers_host(host: object, *, own_servers: bool, environ: Mapping[str, str]) -> None:
    """Raise ValueError if leaders on other nodes cannot reach this job's own servers.

    host: sglang.host, None when it is not given.
    """
    if own_servers and not one_node(environ) and (host in (None, *ANY) or is_loopback(str(host))):
        raise ValueError(
            f"--route-stores over several nodes: sglang.host is {host or LOOPBACK!r}, and leaders"
            " on other nodes cannot reach a server there; give an address of rank 0's node"
            " (--sglang-host)"
        )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

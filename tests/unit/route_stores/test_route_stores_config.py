"""--route-stores: what it cannot go with is refused, and where its stores listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3train.config.cross_checks import check_static
from r3train.config.run import RunConfig
from r3train.config.sources import ConfigError
from r3train.route_stores import stores
from r3train.route_stores.stores import bound_and_known, check_servers_host

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "tiny_cpu.toml"


def complaints(**flags: object) -> str:
    with pytest.raises(ConfigError) as refused:
        check_static(RunConfig.from_sources(file=CONFIG, flags=flags), 2)
    return str(refused.value)


def test_stores_are_off_by_default_and_go_with_replay():
    config = RunConfig.from_sources(file=CONFIG)
    assert config.replay.route_stores is False
    on = dict(route_stores=True, use_rollout_routing_replay=True, plant_bug=None)
    check_static(RunConfig.from_sources(file=CONFIG, flags=on), 2)


def test_stores_without_routes_or_without_a_server_are_refused_with_the_reason():
    assert "--route-stores needs --use-rollout-routing-replay" in complaints(route_stores=True)
    text = complaints(
        route_stores=True, use_rollout_routing_replay=True, replay_rollouts=CONFIG.parent
    )
    assert "--replay-rollouts has no server" in text
    assert "--route-store-host needs --route-stores" in complaints(route_store_host="0.0.0.0")


ONE_NODE = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
TWO_NODES = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.9"}


@pytest.mark.parametrize(
    ("asked", "environ", "expected"),
    [
        (None, ONE_NODE, ("127.0.0.1", "127.0.0.1")),
        ("10.1.2.3", TWO_NODES, ("10.1.2.3", "10.1.2.3")),
        ("0.0.0.0", ONE_NODE, ("0.0.0.0", "127.0.0.1")),
        (None, TWO_NODES, ("127.0.0.1", "127.0.0.1")),
        ("lo", TWO_NODES, ("127.0.0.1", "127.0.0.1")),
    ],
)
def test_stores_listen_on_loopback_on_one_node_and_towards_the_rendezvous_on_several(
    asked, environ, expected
):
    assert bound_and_known(asked, environ, gather=lambda own: [own, own]) == expected


def test_the_rendezvous_node_is_known_by_its_address_towards_another_node(monkeypatch):
    """Its own name may be loopback to itself (/etc/hosts), and nobody else reaches it by that."""
    ways = {"head": "127.0.1.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(stores, "own_address", ways.__getitem__)
    head = {**TWO_NODES, "MASTER_ADDR": "head"}
    everybody = ["127.0.1.1", "127.0.1.1", "10.0.0.2", "10.0.0.2"]
    assert bound_and_known(None, head, gather=lambda own: everybody) == ("10.0.0.1", "10.0.0.1")
    assert bound_and_known("0.0.0.0", head, lambda own: everybody) == ("0.0.0.0", "10.0.0.1")


def test_servers_that_only_rank_0s_node_reaches_are_refused_on_several_nodes():
    for host in (None, "127.0.0.1", "localhost", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="several nodes: sglang.host is"):
            check_servers_host(host, local_servers=True, environ=TWO_NODES)
        check_servers_host(host, local_servers=True, environ=ONE_NODE)
        check_servers_host(host, local_servers=False, environ=TWO_NODES)
    check_servers_host("10.0.0.1", local_servers=True, environ=TWO_NODES)

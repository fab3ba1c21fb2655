"""--route-stores: where the stores listen."""

from __future__ import annotations

import pytest

from r3train.route_stores import stores
from r3train.route_stores.stores import bound_and_known, check_servers_host

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
    assert bound_and_known(asked, environ, gather=lambda address: [address, address]) == expected


def test_the_rendezvous_node_is_known_by_its_address_towards_another_node(monkeypatch):
    """Its own name may be loopback to itself (/etc/hosts), and nobody else reaches it by that."""
    ways = {"head": "127.0.1.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(stores, "local_address", ways.__getitem__)
    head = {**TWO_NODES, "MASTER_ADDR": "head"}
    everybody = ["127.0.1.1", "127.0.1.1", "10.0.0.2", "10.0.0.2"]
    assert bound_and_known(None, head, gather=lambda address: everybody) == ("10.0.0.1", "10.0.0.1")
    assert bound_and_known("0.0.0.0", head, lambda address: everybody) == ("0.0.0.0", "10.0.0.1")


def test_servers_that_only_rank_0s_node_reaches_are_refused_on_several_nodes():
    for host in (None, "127.0.0.1", "localhost", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="several nodes: sglang.host is"):
            check_servers_host(host, local_servers=True, environ=TWO_NODES)
        check_servers_host(host, local_servers=True, environ=ONE_NODE)
        check_servers_host(host, local_servers=False, environ=TWO_NODES)
    check_servers_host("10.0.0.1", local_servers=True, environ=TWO_NODES)

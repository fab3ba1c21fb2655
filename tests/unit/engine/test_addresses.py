"""The address at which servers find rank 0."""

from __future__ import annotations

import pytest

from r3train.engine import addresses
from r3train.engine.addresses import address_for, host_of, interface_of, is_loopback


@pytest.fixture
def ways(monkeypatch):
    """This node has 10.0.0.1 (eth0) and 172.16.0.1 (ib0)."""
    on_the_way = {"127.0.0.1": "127.0.0.1", "10.0.0.7": "10.0.0.1", "node9": "172.16.0.1"}
    monkeypatch.setattr(addresses, "local_address", on_the_way.__getitem__)
    monkeypatch.setattr(addresses, "address_of_interface", {"ib0": "172.16.0.1"}.get)


@pytest.mark.parametrize(
    "peers, asked, expected",
    [
        (["127.0.0.1", "127.0.0.1"], None, "127.0.0.1"),
        (["10.0.0.7"], None, "10.0.0.1"),
        (["127.0.0.1", "node9", "10.0.0.7"], None, "172.16.0.1"),
        (["10.0.0.7"], "ib0", "172.16.0.1"),
        (["10.0.0.7"], "10.0.0.2", "10.0.0.2"),
    ],
)
def test_servers_are_told_the_address_on_the_way_to_them(ways, peers, asked, expected):
    assert address_for(peers, asked) == expected


def test_a_peer_whose_name_does_not_resolve_keeps_no_other_from_its_address():
    assert address_for(["no.such.host.invalid", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(ValueError, match="no.such.host.invalid"):
        address_for(["no.such.host.invalid"])
    assert address_for(["no.such.host.invalid"], "10.0.0.2") == "10.0.0.2"


def test_the_way_is_asked_of_the_system_and_nothing_is_sent():
    assert addresses.local_address("127.0.0.1") == "127.0.0.1"
    assert addresses.local_address("127.9.8.7").startswith("127.")
    assert addresses.address_of_interface(interface_of("127.0.0.1")) == "127.0.0.1"
    assert interface_of("203.0.113.1") is None and interface_of("no.such.host.invalid") is None


@pytest.mark.parametrize(
    "addr, host",
    [("h:1", "h"), ("http://10.0.0.7:30000", "10.0.0.7"), ("[::1]:5", "::1"), ("::", "")],
)
def test_the_host_of_an_address(addr, host):
    assert host_of(addr) == host


def test_loopback_is_told_by_the_text_alone():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.0.1.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "127.example"))

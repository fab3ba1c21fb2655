"""Addresses by which peers reach this node, and the network interfaces that hold them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """True for a loopback address and for "localhost"; other names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(peer: str) -> str:
    """Return the address of this node that a connection to a peer would use; nothing is sent.

    Raises OSError for a name that does not resolve and for a peer without a route to it.
    """
    family, _, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def address_of_interface(name: str) -> str | None:
    """The first IP address of a network interface of this node, None for any other text."""
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses:
            if entry.family == family:
                return entry.address
    return None


def interface_of(host: str) -> str | None:
    """The network interface of this node that holds a host's address, or None."""
    try:
        found = {place[4][0] for place in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address in found for entry in entries):
            return name
    return None


def base_url(addr: str) -> str:
    """Turn ``host:port`` or a URL into a URL without a trailing slash.

    Raises ValueError for an address without a port.
    """
    url = (addr if "://" in addr else f"http://{addr}").rstrip("/")
    if not url.rsplit(":", 1)[-1].isdigit():
        raise ValueError(f"engine address {addr!r} has no port, expected host:port")
    return url


def host_of(addr: str) -> str:
    """The host of ``host:port`` or of a URL, an IPv6 address without its brackets."""
    return urlsplit(addr if "://" in addr else f"http://{addr}").hostname or ""


def address_for(peers: Sequence[str], named: str | None = None) -> str:
    """Choose one address by which all peers reach this node.

    peers: their hosts.  named: an address or a network interface that the user named; it wins.
    Without it the address is loopback if all peers are on loopback, else the address that a
    connection to the first other peer would use.  Peers that cannot be reached are left out; raises ValueError if
    none can.
    """
    if named is not None:
        return address_of_interface(named) or named
    local = []
    for peer in peers:
        try:
            local.append(local_address(peer))
        except OSError as error:
            failure = f"no server can be reached: {peer}: {error}"
    if peers and not local:
        raise ValueError(failure)
    return next((address for address in local if not is_loopback(address)), LOOPBACK)

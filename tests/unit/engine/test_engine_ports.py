"""Addresses at which the servers of a job listen, by its flags; no server is started."""

import pytest

from r3train.engine.server import SGLangServer
from tests.unit.local_servers import servers_of_rank_0


@pytest.fixture
def started(monkeypatch, tmp_path):
    """``started(sglang)`` gives the two servers that a job with these flags would start."""
    monkeypatch.setattr(SGLangServer, "start", lambda self: self)

    def start(**sglang) -> list[SGLangServer]:
        return servers_of_rank_0(tmp_path, 2, **sglang)

    return start


def test_a_given_port_is_the_first_servers_and_the_next_one_the_seconds(started):
    servers = started(port=31000, tp_size=1)
    assert [server.addr for server in servers] == ["127.0.0.1:31000", "127.0.0.1:31001"]
    assert "--tp-size" in servers[0].command()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_servers_come_with_a_key_for_every_user_of_the_node_reaches_loopback(started, host):
    servers = started(host=host)
    keys = {server.api_key for server in servers}
    assert all(server.host == host for server in servers)
    (key,) = keys
    assert len(key) >= 32, "the client sends one key to all of them"
    assert {server.api_key for server in started(host=host)} != keys


def test_a_key_of_the_environment_is_that_of_all_servers_on_loopback_too(started, monkeypatch):
    monkeypatch.setenv("R3TRAIN_ENGINE_API_KEY", "a-key-of-the-environment")
    for host in ("0.0.0.0", "127.0.0.1"):
        assert {s.api_key for s in started(host=host)} == {"a-key-of-the-environment"}


def test_without_flags_servers_listen_on_free_ports_of_loopback(started):
    first, second = started()
    assert first.host == second.host == "127.0.0.1" and first.port != second.port

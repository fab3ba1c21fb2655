"""Where the servers of a job listen, by its flags; no server is started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from r3train.launch import engines
from r3train.rollout.sglang_server import SGLangServer


@pytest.fixture
def started(monkeypatch, tmp_path):
    """``started(sglang)`` gives the two servers that a job with these flags would start."""
    monkeypatch.setattr(SGLangServer, "start", lambda self: self)

    def start(**sglang) -> list[SGLangServer]:
        rollout = SimpleNamespace(
            rollout_num_engines=2,
            rollout_seed=1,
            rollout_server_start_timeout_s=60.0,
            rollout_external_engine_addrs=[],
            sglang=sglang,
        )
        config = SimpleNamespace(
            model=SimpleNamespace(hf_checkpoint=tmp_path, bf16=False),
            replay=SimpleNamespace(use_rollout_routing_replay=False),
            rollout=rollout,
        )
        job = SimpleNamespace(config=config, hf=None)
        made = engines.Engines(job, Path(tmp_path), None, 0)
        made.start_server()
        return made._servers

    return start


def test_a_given_port_is_the_first_servers_and_the_next_one_the_seconds(started):
    servers = started(port=31000, tp_size=1)
    assert [server.addr for server in servers] == ["127.0.0.1:31000", "127.0.0.1:31001"]
    assert [server.api_key for server in servers] == [None, None]
    assert "--tp-size" in servers[0].command()


def test_a_host_that_others_reach_comes_with_a_key(started):
    servers = started(host="0.0.0.0")
    assert all(server.host == "0.0.0.0" and server.api_key for server in servers)


def test_without_flags_servers_listen_on_free_ports_of_loopback(started):
    first, second = started()
    assert first.host == second.host == "127.0.0.1" and first.port != second.port

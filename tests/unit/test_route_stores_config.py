"""--route-stores: what it cannot go with is refused, and where its stores listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3train.config.cross_checks import check_static
from r3train.config.run import RunConfig
from r3train.config.sources import ConfigError
from r3train.launch.route_stores import store_host

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.toml"


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


@pytest.mark.parametrize(
    ("asked", "environ", "expected"),
    [
        (None, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, ("127.0.0.1", "127.0.0.1")),
        ("10.1.2.3", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, ("10.1.2.3", "10.1.2.3")),
        ("0.0.0.0", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, ("0.0.0.0", "127.0.0.1")),
        (
            None,
            {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.9"},
            ("127.0.0.1", "127.0.0.1"),
        ),
    ],
)
def test_stores_listen_on_loopback_on_one_node_and_towards_the_rendezvous_on_several(
    asked, environ, expected
):
    assert store_host(asked, environ) == expected

"""A server's silence, a request's length and the settings that servers must have follow from the run."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from r3train.config import RunConfig
from r3train.launch.start import rollouts, servers
from r3train.loop.route_transport import RoutesOnRank0
from r3train.observe.console import RunDisplay
from r3train.types import RouteShape

RECIPE = Path(__file__).parents[3] / "configs/qwen3_30b_a3b_one_node.toml"
QWEN3 = RouteShape(48, 8, 128)


EXTERNAL = {"rollout_external_engine_addrs": ["127.0.0.1:1"]}


def servers_of(
    directory: Path,
    faults: dict | None = None,
    replay: bool = True,
    index_topk: int | None = None,
    **rollout,
):
    config = RunConfig.from_toml(RECIPE)
    update = {
        "rollout": config.rollout.model_copy(update={"rollout_num_engines": 2} | rollout),
        "faults": config.faults.model_copy(update=faults or {}),
        "replay": config.replay.model_copy(update={"use_rollout_routing_replay": replay}),
    }
    positions = 163_840
    job = SimpleNamespace(
        config=config.model_copy(update=update),
        hf=SimpleNamespace(
            route_shape=QWEN3,
            vocab_size=151_936,
            index_topk=index_topk,
            max_position_embeddings=positions,
        ),
        longest_prompt=2048,
    )
    display = RunDisplay(3, True, live=False, console=Console(file=io.StringIO()))
    return servers.RunServers(job, directory, display, RoutesOnRank0(None, ()))


LONG = {"rollout_max_response_len": 32768, "rollout_max_context_len": 34816}


@pytest.mark.parametrize(
    "rollout, seconds",
    [
        # 256 requests over 2 servers, each of 10,240 tokens x 384 ids x 16/3 bytes: 2.68 GB
        ({}, 60 + 26.8),
        # of 34,816 tokens, 9.13 GB, which were measured to block /health for 30 to 40 s
        (LONG, 60 + 91.3),
        (LONG | {"rollout_num_engines": 4}, 60 + 45.6),
        (LONG | {"rollout_max_concurrency": 4}, 60 + 1.43),
    ],
)
def test_a_server_may_be_silent_while_it_encodes_the_routes_of_all_its_requests(
    rollout, seconds, tmp_path
):
    made = servers_of(tmp_path, **rollout)
    assert made.health_timeout_s == pytest.approx(seconds, rel=0.002)
    asked = servers_of(tmp_path, {"engine_health_timeout_s": 7.0}, **rollout)
    assert asked.health_timeout_s == pytest.approx(seconds - 53, rel=0.002)
    assert servers_of(tmp_path, replay=False, **rollout).health_timeout_s == 60.0


def test_it_also_encodes_what_indexers_chose_where_that_is_replayed(tmp_path):
    # 34,816 tokens are 544 words for each of 48 layers: 28 times as much as 8 experts are as int32
    routes = servers_of(tmp_path, **LONG).health_timeout_s - 60
    both = servers_of(tmp_path, index_topk=2048, **LONG)
    assert both.health_timeout_s - 60 == pytest.approx(routes * (8 * 4 + 544 * 8) / 32, rel=1e-6)
    implied = servers_of(tmp_path, index_topk=34816, **LONG)
    assert implied.health_timeout_s - 60 == pytest.approx(routes)


async def test_the_watch_and_the_client_take_that_limit(tmp_path, monkeypatch):
    given = []

    def watch(_servers, **options):
        given.append(options["health_timeout_s"])
        raise InterruptedError

    monkeypatch.setattr(servers, "EngineSupervisor", watch)
    made = servers_of(tmp_path, **LONG)
    made.own = [SimpleNamespace(wait_ready=lambda: None, addr="127.0.0.1:1", api_key=None)]
    with pytest.raises(InterruptedError):
        made.wait_ready()
    client = rollouts.GeneratedRollouts(made).make_client()
    given.append(client.health_timeout_s)
    await client.aclose()
    assert given == [made.health_timeout_s] * 2 and given[0] > 150


@pytest.mark.parametrize(
    "replay, rollout, asked",
    [
        (True, {}, {"replay": True}),
        (False, {}, {}),
        (
            True,
            {"pause_generation_mode": "abort", "rollout_top_k": 20},
            {"replay": True, "kept_top_k": 20, "exact_boundaries": True},
        ),
        (True, {"index_topk": 2048}, {"replay": True, "indexer": True}),
        (False, {"index_topk": 2048}, {}),
    ],
)
def test_servers_must_have_the_settings_that_the_run_needs(
    replay, rollout, asked, tmp_path, monkeypatch
):
    given = []

    def require(**settings):
        given.append(settings)
        raise InterruptedError

    control = SimpleNamespace(require_settings=require, members=None)
    monkeypatch.setattr(servers, "EngineControl", lambda *_addrs, **_options: control)
    made = servers_of(tmp_path, replay=replay, **(EXTERNAL | rollout))
    with pytest.raises(InterruptedError):
        made.wait_ready()
    unasked = dict.fromkeys(("replay", "indexer", "exact_boundaries"), False)
    assert given == [{**unasked, "kept_top_k": None, **asked}]


@pytest.mark.parametrize(
    "gpus, faults, rollout, length",
    [
        (0, {}, {}, None),
        (8, {}, {}, None),
        (0, {"max_engine_restarts": 1}, {}, 256),
        (8, {"max_engine_restarts": 1}, {}, 2048),
        (8, {"max_engine_restarts": 1}, {"sglang": {"device": "cpu"}}, 256),
        (8, {"max_engine_restarts": 1}, {"rollout_segment_len": 300}, 300),
        (0, {}, {"rollout_segment_len": 300}, 300),
    ],
)
def test_a_request_is_longer_on_gpus_where_servers_may_be_restarted(
    gpus, faults, rollout, length, tmp_path, monkeypatch
):
    monkeypatch.setattr(rollouts, "visible_gpus", lambda: gpus)
    assert rollouts.GeneratedRollouts(servers_of(tmp_path, faults, **rollout)).segment_len == length

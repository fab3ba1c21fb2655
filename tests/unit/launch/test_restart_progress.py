"""Servers of the run that start again: when, and what rank 0's output has of it."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from r3train.config.agent_settings import AgentSection
from r3train.engine.backend import EngineUnreachable
from r3train.engine.members import Members
from r3train.launch.start.servers import RunServers
from r3train.loop.route_transport import RoutesOnRank0
from r3train.observe.console import RunDisplay


def one_server(run_dir, display, starts) -> RunServers:
    """A run's servers: one, which ``starts`` starts again; publisher and calls do nothing."""
    rollout = SimpleNamespace(rollout_external_engine_addrs=[])
    replay = SimpleNamespace(use_rollout_routing_replay=False)
    sections = dict(rollout=rollout, replay=replay, agent=AgentSection())
    config = SimpleNamespace(**sections, serves_adapters=False)
    job = SimpleNamespace(config=config, hf=None)
    servers = RunServers(job, run_dir, display, RoutesOnRank0(None, ()))
    servers.own = [SimpleNamespace(on_progress=None, addr="127.0.0.1:1")]
    servers.members = Members(["127.0.0.1:1"], [3], changes=True)
    servers.supervisor = SimpleNamespace(restart=starts, check=lambda: None)
    servers.control = SimpleNamespace(restarted=lambda: None, text_ends=dict)
    servers.weights = SimpleNamespace(publisher=SimpleNamespace(reconnect=lambda: None))
    return servers


def test_the_progress_of_a_restart_never_says_starting(tmp_path):
    """A server keeps its callback: that of the first start names the phase that is long over."""
    out, now = io.StringIO(), [0.0]
    display = RunDisplay(
        3, True, live=False, console=Console(file=out, width=100), clock=lambda: now[0]
    )

    def loads(cause: str = "") -> None:
        now[0] += 100.0
        server.on_progress(100.0, "loading weights")

    servers = one_server(tmp_path, display, loads)
    [server] = servers.own
    with display.phase("starting SGLang") as phase:
        server.on_progress = lambda _, stage: phase.detail(stage)
        loads()
    before = len(out.getvalue())
    servers.restart("it ended")
    assert out.getvalue()[:before].count("starting SGLang") == 3
    assert [line.rstrip() for line in out.getvalue()[before:].splitlines()] == [
        "restarting SGLang ...",
        "restarting SGLang (1 min 40 s): loading weights",
        "done: restarting SGLang, 1 min 40 s",
    ]


def test_one_that_left_is_missed_by_the_next_update_and_joins_again_without_weights(tmp_path):
    """Others may answer all requests, so that training never waits for it."""
    servers = one_server(tmp_path, RunDisplay(3, enabled=False), lambda cause: None)
    with servers.unchanged():
        pass
    servers.members.leave(0, "a call failed")
    with pytest.raises(EngineUnreachable), servers.unchanged():
        pass
    servers.restart("a call failed")
    assert servers.members.present() == [0] and servers.members.all() == [None]
    with servers.unchanged():
        pass

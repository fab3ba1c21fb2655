"""The progress of servers that start again, as rank 0's output has it."""

from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from r3train.config.agent_settings import AgentSection
from r3train.launch.start.servers import RunServers
from r3train.loop.route_transport import RoutesOnRank0
from r3train.observe.console import RunDisplay


def test_the_progress_of_a_restart_never_says_starting(tmp_path):
    """A server keeps its callback: that of the first start names the phase that is long over."""
    out, now = io.StringIO(), [0.0]
    display = RunDisplay(
        3, True, live=False, console=Console(file=out, width=100), clock=lambda: now[0]
    )
    rollout = SimpleNamespace(rollout_external_engine_addrs=[])
    replay = SimpleNamespace(use_rollout_routing_replay=False)
    sections = dict(rollout=rollout, replay=replay, agent=AgentSection())
    config = SimpleNamespace(**sections, serves_adapters=False)
    job = SimpleNamespace(config=config, hf=None)
    servers = RunServers(job, tmp_path, display, RoutesOnRank0(None, ()))
    server = SimpleNamespace(on_progress=None, addr="127.0.0.1:1")

    def loads() -> None:
        now[0] += 100.0
        server.on_progress(100.0, "loading weights")

    servers.own = [server]
    with display.phase("starting SGLang") as phase:
        server.on_progress = lambda _, stage: phase.detail(stage)
        loads()
    servers.members = SimpleNamespace(record=lambda version: None)
    servers.supervisor = SimpleNamespace(restart=loads)
    servers.control = SimpleNamespace(restarted=lambda: None, text_ends=dict)
    servers.weights = SimpleNamespace(publisher=SimpleNamespace(reconnect=lambda: None))
    before = len(out.getvalue())
    servers.restart()
    assert out.getvalue()[:before].count("starting SGLang") == 3
    assert [line.rstrip() for line in out.getvalue()[before:].splitlines()] == [
        "restarting SGLang ...",
        "restarting SGLang (1 min 40 s): loading weights",
        "done: restarting SGLang, 1 min 40 s",
    ]

"""A server of ours sends short routes, whichever way its scheduler's process starts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

# as a server's process does it, without its key and flags; a process of its own, because patches stay
_INSTALLED = """
from r3train.cpu.torchvision_stub import declare_torchvision_ops
declare_torchvision_ops()
from r3train.engine import compact_routes
compact_routes.install()
from sglang.srt.entrypoints import engine, http_server
import inspect, pickle
starts = [
    engine.Engine.run_scheduler_process_func,
    inspect.signature(http_server.launch_server).parameters["run_scheduler_process_func"].default,
]
assert all(start is compact_routes.run_scheduler for start in starts), starts
print(pickle.dumps(starts[0]).hex())
"""


def test_every_scheduler_that_sglang_starts_is_ours_and_a_spawned_process_finds_it():
    done = subprocess.run(
        [sys.executable, "-c", _INSTALLED], capture_output=True, text=True, check=True
    )
    start = pickle.loads(bytes.fromhex(done.stdout.split()[-1]))
    assert start.__module__ == "r3train.engine.compact_routes"


@pytest.mark.parametrize(
    "ids, sent", [([[[3, 1]], [[0, 2]]], "u1:AwEAAg=="), ([[[3, -1]]], None), (None, None)]
)
def test_what_a_scheduler_collected_is_sent_short_where_it_can_be(monkeypatch, ids, sent):
    from r3train.engine import compact_routes

    tensor = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    monkeypatch.setattr(
        compact_routes, "_collect", lambda self, req: setattr(req, "routed_experts", tensor)
    )
    request = SimpleNamespace(routed_experts=None)
    compact_routes._collect_short(None, request)
    if sent is None:
        assert request.routed_experts is tensor
    else:
        assert request.routed_experts == sent

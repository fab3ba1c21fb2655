"""The calls of a GPU node's ranks before their first collective, with ``torch.cuda`` stubbed."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train_async
from r3train.config.parallel import ParallelSection
from r3train.engine.server import SGLangServer
from r3train.loop import scatter
from r3train.trainer.megatron.cpu_device import prepare_device

prepare_device()  # adapts Megatron to this CPU before the stubs claim a device

from r3train.trainer.megatron import topology  # noqa: E402

NUM_RANKS = 8
CUMEM = "NCCL_CUMEM_ENABLE"


@pytest.fixture
def node(monkeypatch):
    """A stand-in for eight GPUs: ``become(i)`` is local rank i; ``joined`` notes each rank's groups."""
    current = SimpleNamespace(device=0, joined=[])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: setattr(current, "device", int(d)))

    def join(backend, **_):
        current.joined.append((backend, current.device, os.environ.get(CUMEM)))

    def become(local_rank):
        current.device = 0
        for name, value in (("LOCAL_RANK", local_rank), ("RANK", local_rank), ("WORLD_SIZE", 8)):
            monkeypatch.setenv(name, str(value))
        store = (dist.HashStore(), local_rank, NUM_RANKS)
        monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([store]))

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(dist, "new_group", lambda **facts: join(facts["backend"]))
    monkeypatch.delenv(CUMEM, raising=False)
    yield SimpleNamespace(become=become, joined=current.joined)


def test_every_rank_of_a_job_trains_on_its_own_device(node, monkeypatch, tmp_path):
    trained_on = []

    def train(job, device, rank, *_):
        trained_on.append((rank, device, torch.cuda.current_device()))
        raise StopIteration

    monkeypatch.setattr(train_async, "train", train)
    monkeypatch.setattr(scatter, "broadcast_json", lambda value: value)
    monkeypatch.setattr(topology, "shutdown", lambda: None)
    monkeypatch.setattr(train_async, "open_run_dir", lambda *_: tmp_path)
    config = SimpleNamespace(
        run=SimpleNamespace(progress=False, log_level="ERROR"),
        rollout=SimpleNamespace(num_rollout=1),
        faults=SimpleNamespace(signal_grace_s=60),
        parallel=ParallelSection(),
    )
    for rank in range(NUM_RANKS):
        node.become(rank)
        assert train_async.run(SimpleNamespace(config=config), rank, tmp_path) == 1
    assert trained_on == [(i, torch.device("cuda", i), i) for i in range(NUM_RANKS)]
    # the group of the device is made when the rank has its device; the host's group is beside it
    assert node.joined == [
        g for i in range(NUM_RANKS) for g in (("nccl", i, "0"), ("gloo", i, "0"))
    ]


@pytest.mark.parametrize(
    "module",
    ["r3train.verify.worker", "benchmarks.replay_overhead", "benchmarks.agreement_worker"],
)
def test_every_rank_of_a_worker_has_its_own_device(module, node, monkeypatch):
    worker = importlib.import_module(module)
    try:
        for rank in range(NUM_RANKS):
            node.become(rank)
            assert importlib.reload(worker).DEVICE == torch.device("cuda", rank)
    finally:
        monkeypatch.undo()
        importlib.reload(worker)


@pytest.mark.parametrize("users", [None, "1"])
def test_ranks_and_servers_agree_on_cumem_before_the_first_communicator(users, node, monkeypatch):
    if users is not None:
        monkeypatch.setenv(CUMEM, users)
    node.become(0)
    topology.init_distributed("auto", 1)
    ranks_see = {value for _, _, value in node.joined}
    monkeypatch.delenv(CUMEM)
    if users is not None:
        monkeypatch.setenv(CUMEM, users)
    servers_see = SGLangServer("model", "log", device="cuda").environment()[CUMEM]
    assert ranks_see == {servers_see} == {users or "0"}

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
from r3train.cuda_environment import NCCL_DEFAULTS, RANK_DEFAULTS
from r3train.loop import scatter
from r3train.trainer.megatron.cpu_device import prepare_device

prepare_device()  # adapts Megatron to this CPU before the stubs claim a device

from r3train.trainer.megatron import topology  # noqa: E402

NUM_RANKS = 8
CUMEM = "NCCL_CUMEM_ENABLE"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture
def node(monkeypatch):
    """A stand-in for eight GPUs: ``become(i)`` is local rank i; ``joined`` notes each rank's groups."""
    current = SimpleNamespace(device=0, joined=[])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)

    def set_device(device):
        current.device = int(device)
        current.environment = {name: os.environ.get(name) for name in RANK_DEFAULTS}

    monkeypatch.setattr(torch.cuda, "set_device", set_device)

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
    for name in (*RANK_DEFAULTS, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # to be restored, whatever a rank sets
        monkeypatch.delenv(name)
    yield SimpleNamespace(become=become, joined=current.joined, current=current)


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
        sums_evidence=False,
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


def test_a_rank_has_its_environment_before_it_touches_its_device(node):
    node.become(3)
    assert prepare_device() == torch.device("cuda", 3)
    assert node.current.environment == RANK_DEFAULTS
    assert RANK_DEFAULTS["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_ALLOC_CONF", "NCCL_NVLS_ENABLE"])
def test_a_users_own_environment_stays(name, node, monkeypatch):
    monkeypatch.setenv(name, "users")
    node.become(0)
    prepare_device()
    seen = node.current.environment
    assert seen.get(name) == ("users" if name in RANK_DEFAULTS else None)
    assert (seen[ALLOCATOR] is None) == (name == "PYTORCH_ALLOC_CONF")


def test_servers_have_none_of_a_ranks_own_settings(node):
    node.become(0)
    prepare_device()
    servers = SGLangServer("model", "log", device="cuda").environment()
    own = set(RANK_DEFAULTS) - set(NCCL_DEFAULTS)
    assert not own & set(servers)
    assert {name: servers[name] for name in NCCL_DEFAULTS} == NCCL_DEFAULTS

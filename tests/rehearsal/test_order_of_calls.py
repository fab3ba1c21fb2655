"""The calls of a GPU node's ranks before their first collective, with ``torch.cuda`` stubbed."""

from __future__ import annotations

import importlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from r3train.launch.start import rank as rank_program
from r3train.config.model_settings import ModelSection
from r3train.config.parallel_settings import ParallelSection
from r3train.cpu.device import prepare_device
from r3train.cuda_environment import NCCL_DEFAULTS, RANK_DEFAULTS
from r3train.launch.gpus import gpus_here
from r3train.engine import publish
from r3train.engine.server import SGLangServer
from r3train.launch.start import last_words
from r3train.loop import server_weights
from r3train.loop import distribute
from r3train.observe import logging_setup

prepare_device()  # adapts Megatron to this CPU before the stubs claim a device

from megatron.core import tensor_parallel  # noqa: E402

from r3train.launch.start.run_rank import RankOfRun  # noqa: E402
from r3train.trainer.megatron import offload, rng, topology  # noqa: E402

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

    def train(rank, device):
        trained_on.append((rank.rank, device, torch.cuda.current_device()))
        raise StopIteration

    monkeypatch.setattr(RankOfRun, "train", train)
    monkeypatch.setattr(distribute, "broadcast_json", lambda value: value)
    monkeypatch.setattr(topology, "shutdown", lambda: None)
    monkeypatch.setattr(rank_program, "open_run_dir", lambda *_: tmp_path)
    config = SimpleNamespace(
        run=SimpleNamespace(progress=False, log_level="ERROR"),
        rollout=SimpleNamespace(num_rollout=1),
        faults=SimpleNamespace(signal_grace_s=60),
        checkpoint=SimpleNamespace(save=None, save_hf=None),
        sums_evidence=False,
        model=ModelSection(hf_checkpoint=tmp_path),
        parallel=ParallelSection(),
    )
    opened = []

    def keep(*args, **kwargs):
        opened.append(setup(*args, **kwargs))
        return opened[-1]

    setup = logging_setup.setup_logging
    monkeypatch.setattr(rank_program, "setup_logging", keep)
    monkeypatch.setattr(last_words, "RANK_0_SHOWS_S", 0.1)  # no rank 0 comes to show an error here
    try:
        for rank in range(NUM_RANKS):
            node.become(rank)
            assert rank_program.run(SimpleNamespace(config=config), rank, tmp_path, [], 1) == 1
    finally:
        for log in reversed(opened):  # this process goes on: its output and loggers are the tests'
            log.close()
    assert trained_on == [(i, torch.device("cuda", i), i) for i in range(NUM_RANKS)]
    # the group of the device is made when the rank has its device; the host's group is next to it
    assert node.joined == [
        g for i in range(NUM_RANKS) for g in (("nccl", i, "0"), ("gloo", i, "0"))
    ]


@pytest.mark.parametrize(
    "module",
    ["r3train.verify.topology_worker", "benchmarks.replay_overhead"],
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


@pytest.mark.parametrize("colocate, found", [(False, ("nccl", "cuda")), (True, ("gloo", "cpu"))])
def test_weights_go_by_nccl_where_ranks_and_servers_have_devices_of_their_own(
    colocate, found, node, monkeypatch
):
    """NCCL refuses a device twice in a group."""
    monkeypatch.setattr(server_weights, "sent_together", lambda _: ())
    monkeypatch.setattr(server_weights, "has_fused_experts", lambda _: False)
    config = SimpleNamespace(
        serves_fp8=False,
        trainer=SimpleNamespace(update_weight_buffer_size=1),
        rollout=SimpleNamespace(colocate=colocate, fresh_prefixes=True),
    )
    hf = SimpleNamespace(path=None)
    way = server_weights.broadcast_settings(config, hf, ["127.0.0.1"], None)
    assert (way["group"].backend, way["group"].device) == found


def test_the_thread_of_a_first_broadcast_is_on_the_device_of_the_weights(node, monkeypatch):
    """A new thread's device is the first, and NCCL makes its communicator there."""
    calls = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((device, threading.get_ident()))
    )
    monkeypatch.setattr(
        dist, "broadcast", lambda *_, **__: calls.append(("broadcast", threading.get_ident()))
    )
    publisher = publish.DistributedPublisher(
        SimpleNamespace(), bucket_bytes=1, group=publish.BroadcastGroup("nccl")
    )
    flat = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    publisher._broadcast(flat, publish.Future())
    (device, first), (what, second) = calls
    assert (device, what) == (torch.device("cuda", 3), "broadcast")
    assert first == second != threading.get_ident()
    publisher._broadcast(flat, publish.Future())  # of a communicator that is there
    assert calls[-1] == ("broadcast", threading.get_ident())


def test_a_checkpoint_has_the_random_state_of_the_device(node, monkeypatch, tmp_path):
    given, restored = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: given)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    rng.save(tmp_path, 3)
    assert rng.load(tmp_path, 3)
    assert len(restored) == 1 and torch.equal(restored[0], given)


def test_the_random_state_of_a_cpu_is_no_devices_and_a_devices_no_cpus(node, monkeypatch, tmp_path):
    """A tracker's is the device's: of another size, and refused by torch once dropout asks for it."""
    cuda, kept = torch.arange(16, dtype=torch.uint8), tensor_parallel.get_cuda_rng_tracker()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    for saved_with in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: saved_with)
        kept.states_ = {"tracker": cuda if saved_with else torch.get_rng_state()}
        rng.save(tmp_path, 3)
        own = kept.states_ = {"tracker": torch.get_rng_state() if saved_with else cuda}
        before = torch.get_rng_state()
        torch.rand(1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: not saved_with)
        assert not rng.load(tmp_path, 3)
        assert kept.states_ is own and not torch.equal(torch.get_rng_state(), before)


def test_memory_that_a_rank_gives_up_is_the_devices_before_others_come_back(node, monkeypatch):
    """torch would keep it, and servers of the same device would find none."""
    tensors, calls = {part: torch.ones(4) for part in offload.PARTS}, []
    actor = offload.DeviceMemory([], SimpleNamespace(zero_grad=lambda: None), torch.device("cuda"))
    monkeypatch.setattr(actor, "_storages", lambda part: [tensors[part].untyped_storage()])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(actor.num_bytes()))
    actor.hold("weights")
    actor.hold()
    actor.hold(*offload.PARTS)
    assert calls == [16, 0, 0] and actor.num_bytes() == 48
    assert (
        tensors["optimizer"].sum() == tensors["weights"].sum() == 4
        and not tensors["gradients"].any()
    )


def test_the_smallest_gpu_is_the_one_that_counts(node, monkeypatch):
    sizes = [80, 40, 80]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i])
    )
    assert gpus_here() == (3, 40)

"""Buckets, their bytes, and checkpoints on disk; the engines are recorded, not run."""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from r3train.engine import publish
from r3train.engine.backend import EngineDied, EngineError, GroupBroken
from r3train.engine.control import EngineControl
from r3train.engine.publish import BroadcastGroup, DistributedPublisher, WeightUpdateError
from r3train.engine.publish import buckets, flatten
from r3train.engine.publish_disk import Comparison, DiskPublisher, compare_on_servers
from r3train.engine.publish_memory import SharedMemoryPublisher
from r3train.families.read_facts import read_hf_facts
from r3train.hf_checkpoint import WeightIndex, check_name, kind_of, write_shards
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.fakes.server import Fake


def tensors(*shapes, dtype=torch.float32):
    return [(f"w{i}", torch.arange(1.0, n + 1).to(dtype)) for i, n in enumerate(shapes)]


def test_buckets_keep_the_order_and_the_limit():
    got = [[name for name, _ in bucket] for bucket in buckets(tensors(4, 4, 2, 9, 1), 40)]
    assert got == [["w0", "w1", "w2"], ["w3", "w4"]]


def test_a_tensor_larger_than_the_limit_is_a_bucket_of_its_own():
    assert [len(bucket) for bucket in buckets(tensors(1, 100, 1), 8)] == [1, 1, 1]


def test_a_bucket_ends_where_a_tensor_of_another_dtype_would_not_be_aligned():
    mixed = [
        ("a", torch.ones(3, dtype=torch.bfloat16)),
        ("b", torch.ones(2)),
        ("c", torch.ones(2)),
        ("d", torch.ones(1, dtype=torch.bfloat16)),
    ]
    assert [[n for n, _ in bucket] for bucket in buckets(mixed, 1 << 20)] == [
        ["a"],
        ["b", "c", "d"],
    ]


def test_no_bucket_ends_between_a_pair():
    """Of such a pair SGLang forgets the half that comes alone, and answers success."""
    pairs = [("w1", "w3"), ("w5", "w4")]
    for limit in range(4, 60, 4):
        got = list(buckets(tensors(1, 2, 1, 3, 2, 1, 1), limit, pairs))
        assert sorted(n for bucket in got for n, _ in bucket) == [f"w{i}" for i in range(7)]
        for bucket in got:
            names = {name for name, _ in bucket}
            assert all(len(names & set(pair)) != 1 for pair in pairs), (limit, names)


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="'w0' came without 'w9'"):
        list(buckets(tensors(1, 2), 8, [("w0", "w9")]))


def test_flattened_bytes_are_those_of_every_tensor_in_order():
    bucket = [("a", torch.arange(6.0).reshape(2, 3).t()), ("b", torch.tensor(7.0))]
    memory = torch.full((40,), 9, dtype=torch.uint8)
    flat = flatten(bucket, memory)
    assert flat.data_ptr() == memory.data_ptr() and memory[28:].tolist() == [9] * 12
    assert flat.view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5, 7]


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj"]
)
def test_fused_expert_names_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="fused expert tensor"):
        check_name(name)
    with pytest.raises(ValueError, match="fused expert tensor"):
        list(buckets([(name, torch.ones(1))], 8))
    with pytest.raises(ValueError, match="fused expert tensor"):
        write_shards([(name, torch.ones(1))], tmp_path, shard_bytes=8)


def test_per_expert_and_dense_names_pass():
    for name in ("model.layers.0.mlp.experts.7.down_proj.weight", "model.norm.weight"):
        assert check_name(name) == name


def read_checkpoint(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    got = {}
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, "pt") as shard:
            got[name] = shard.get_tensor(name)
    return index, got


def test_shards_and_their_index_hold_every_tensor(tmp_path):
    named = tensors(4, 4, 2, 9, 1)
    named.append(("view", named[3][1][2:5]))
    assert write_shards(named, tmp_path, shard_bytes=40) == (6, 92, 3)
    index, got = read_checkpoint(tmp_path)
    assert index["metadata"]["total_size"] == 92
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert got.keys() == dict(named).keys()
    for name, tensor in named:
        assert torch.equal(got[name], tensor)


def test_a_name_that_comes_twice_and_no_tensor_at_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'w0' came twice"):
        write_shards(tensors(1) + tensors(1), tmp_path, shard_bytes=8)
    with pytest.raises(ValueError, match="no weight"):
        write_shards([], tmp_path, shard_bytes=8)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A checkpoint with dense layers, shared experts and expert biases: its directory and tensors."""
    directory = write_checkpoint(VARIANTS["glm"], tmp_path_factory.mktemp("zoo"))
    return directory, load_file(directory / "model.safetensors")


def require(directory, tensors, *, dtype="float32", num_bytes=None):
    sent = {name: kind_of(tensor) for name, tensor in tensors.items()}
    if num_bytes is None:
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    WeightIndex(read_hf_facts(directory), dtype).require(sent, num_bytes, version=7)


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def test_an_update_of_the_checkpoints_tensors_fits_in_the_runs_dtype_or_a_wider_one(zoo):
    directory, tensors = zoo
    require(directory, tensors)
    require(directory, tensors, dtype="bfloat16")
    narrow = {n: t if n.endswith("_bias") else t.bfloat16() for n, t in tensors.items()}
    require(directory, narrow, dtype="bfloat16")


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda t: t.pop(EXPERT), f"{EXPERT} was not sent"),
        (lambda t: t.pop(BIAS), f"{BIAS} was not sent"),
        (
            lambda t: [t.pop(n) for n in list(t) if ".experts.3." in n],
            r"down_proj.weight, .* and \d+ more was not sent",
        ),
        (lambda t: t.update(extra=t[BIAS]), "extra was sent and is not in it"),
        (
            lambda t: t.update({EXPERT: t[EXPERT].t()}),
            rf"{EXPERT} was sent as float32 \[\d+, \d+\], expected float32 \[",
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].bfloat16()}),
            rf"{EXPERT} was sent as bfloat16 .*, expected float32 \[",
        ),
    ],
)
def test_an_update_that_does_not_fit_the_checkpoint_is_refused_by_name(zoo, change, complaint):
    directory, tensors = zoo
    changed = dict(tensors)
    change(changed)
    with pytest.raises(ValueError, match="weight update 7 does not fit .*" + complaint) as error:
        require(directory, changed)
    assert "\n" not in str(error.value)


def test_fewer_bytes_than_the_tensors_have_are_refused(zoo):
    directory, tensors = zoo
    total = sum(tensor.nbytes for tensor in tensors.values())
    with pytest.raises(ValueError, match=f"{total - 4} bytes were sent, its tensors have {total}"):
        require(directory, tensors, num_bytes=total - 4)


def test_layers_beyond_the_models_and_a_tied_output_layer_are_not_asked_for(tmp_path):
    directory = write_checkpoint(VARIANTS["tied"], tmp_path)
    tensors = load_file(directory / "model.safetensors")
    surplus = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    surplus["model.layers.99.eh_proj.weight"] = torch.ones(3)
    save_file(tensors | surplus, directory / "model.safetensors")
    require(directory, tensors)
    with pytest.raises(ValueError, match="lm_head.weight was sent and is not in it"):
        require(directory, tensors | {"lm_head.weight": surplus["lm_head.weight"]})


class Engine:
    """Records calls; ``refuse`` makes the disk call fail as a server would."""

    def __init__(self, refuse=False):
        self.calls = []
        self.refuse = refuse
        self.join_error = RuntimeError("backend not there")

    def update_weights_from_disk(
        self, model_path, *, weight_version, flush_cache=True, server=None
    ):
        self.calls.append((model_path, weight_version, *([] if server is None else [server])))
        if self.refuse:
            raise RuntimeError("no")

    def present(self):
        return [0, 1]

    def update_group_sizes(self, servers):
        return [2, 1]

    def init_weights_update_group(self, **arguments):
        self.calls.append(arguments)
        joined = Future()
        joined.set_exception(self.join_error)
        return joined

    def check_alive(self):
        pass


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "hf"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (path / name).write_text(json.dumps({"file": name}))
    (path / "model.safetensors.index.json").write_text("{}")
    return path


@pytest.mark.parametrize("kind", [DiskPublisher, SharedMemoryPublisher])
def test_a_server_that_joins_is_given_the_newest_version_that_servers_hold(
    kind, tmp_path, checkpoint
):
    engine = Engine()
    publisher = kind(
        engine, directory=tmp_path / "weights", hf_checkpoint=checkpoint, bucket_bytes=40
    )
    assert publisher.give(3) is None and not engine.calls, "nobody has any yet"
    for version in (1, 2):
        publisher.publish(tensors(4, 9), version=version)
        assert publisher.give(3) == version
        path = engine.calls[-2][0]
        assert engine.calls[-1] == (path, version, 3)
    engine.refuse = True
    with pytest.raises(RuntimeError):
        publisher.publish(tensors(4, 9), version=3)
    assert publisher.give(3) is None, "nobody knows what servers hold"
    publisher.close()


def test_a_server_elsewhere_is_refused_where_weights_are_sent_on_loopback():
    local = DistributedPublisher(Engine(), bucket_bytes=40)
    local.require_reach("http://localhost:1")
    with pytest.raises(ValueError, match="update-weight-master-address"):
        local.require_reach("http://10.0.0.7:30000")
    DistributedPublisher(
        Engine(), bucket_bytes=40, group=BroadcastGroup(master_address="10.0.0.1")
    ).require_reach("h:1")


def test_the_disk_transport_leaves_one_whole_version(tmp_path, checkpoint):
    engine = Engine()
    directory = tmp_path / "weights"
    publisher = DiskPublisher(
        engine, directory=directory, hf_checkpoint=checkpoint, bucket_bytes=40
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "vital_notes").mkdir()
    for version in (1, 2, 2):
        done = publisher.publish(tensors(4, 9), version=version)
        assert (done.version, done.num_tensors, done.num_bytes) == (version, 2, 52)
        assert done.sent == {name: kind_of(tensor) for name, tensor in tensors(4, 9)}
    assert [call[1] for call in engine.calls] == [1, 2, 2]
    assert sorted(path.name for path in directory.iterdir()) == ["v000002", "vital_notes"]
    names = sorted(path.name for path in (directory / "v000002").iterdir())
    assert names[:1] == ["config.json"] and "tokenizer.json" in names
    assert "model.safetensors" not in names and "pytorch_model.bin" not in names
    assert read_checkpoint(directory / "v000002")[1].keys() == {"w0", "w1"}


def in_memory(engine, tmp_path, checkpoint, bucket_bytes=40):
    return SharedMemoryPublisher(
        engine, directory=tmp_path / "m", hf_checkpoint=checkpoint, bucket_bytes=bucket_bytes
    )


def read_memory(directory):
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def test_the_memory_transport_writes_every_version_over_the_last_one(tmp_path, checkpoint):
    engine, directory = Engine(), tmp_path / "m"
    publisher = in_memory(engine, tmp_path, checkpoint)
    files = []
    for version in (1, 2):
        named = [*tensors(4, 9), ("half", torch.full((3, 1), version, dtype=torch.bfloat16))]
        named.append(("across", torch.arange(6.0).reshape(2, 3).T * version))
        done = publisher.publish(iter(named), version=version)
        assert (done.num_tensors, done.num_buckets, done.num_bytes) == (4, 4, 82)
        assert done.sent == {name: kind_of(tensor) for name, tensor in named}
        got = read_memory(directory)
        assert got.keys() == done.sent.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in named)
        files.append([(file.name, file.stat().st_ino) for file in sorted(directory.iterdir())])
    assert files[0] == files[1] and len(files[0]) == 6  # with config.json and tokenizer.json
    assert [call[1] for call in engine.calls] == [1, 2]
    publisher.publish(tensors(3), version=3)
    assert {name: t.tolist() for name, t in read_memory(directory).items()} == {"w0": [1, 2, 3]}
    publisher.close()
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "tokenizer.json"]


def test_of_a_killed_job_no_memory_stays_and_its_directory_can_be_used_again(tmp_path, checkpoint):
    in_job = os.fork()
    if in_job == 0:  # pragma: no cover
        in_memory(Engine(), tmp_path, checkpoint).publish(tensors(4), version=1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(in_job, 0)[1]) == -signal.SIGKILL
    (link,) = (tmp_path / "m").glob("*.safetensors")
    assert not link.exists()
    publisher = in_memory(Engine(), tmp_path, checkpoint)
    publisher.publish(tensors(4), version=1)
    assert read_memory(tmp_path / "m").keys() == {"w0"}
    publisher.close()


class Cuda:
    """The calls of CUDA's runtime that register memory; ``refuses`` is the error of the first."""

    def __init__(self, refuses=0):
        self.refuses, self.calls = refuses, []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append(("register", address, size))
        return self.refuses

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cuda(monkeypatch):
    stub = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    return stub


def test_the_whole_memory_of_every_file_is_registered_with_cuda_until_it_is_dropped(
    cuda, tmp_path, checkpoint
):
    publisher = in_memory(Engine(), tmp_path, checkpoint)
    for version in (1, 2):  # which stays registered
        publisher.publish(tensors(4, 9), version=version)
        found = {ctypes.string_at(address, size) for _, address, size in cuda.calls}
        assert found == {file.read_bytes() for file in (tmp_path / "m").glob("*.safetensors")}
        assert len(cuda.calls) == 2
    first, second = (("unregister", address) for _, address, _ in cuda.calls)
    publisher.publish(tensors(3), version=3)  # another kind, and no second file
    assert cuda.calls[2] == first and cuda.calls[3][0] == "register" and cuda.calls[4:] == [second]
    publisher.close()
    assert cuda.calls[5:] == [("unregister", cuda.calls[3][1])]


def test_memory_that_cuda_does_not_register_is_written_all_the_same_and_said_once(
    cuda, tmp_path, checkpoint, caplog
):
    cuda.refuses = 2
    publisher, named = in_memory(Engine(), tmp_path, checkpoint), tensors(4, 9)
    for version in (1, 2):
        publisher.publish(named, version=version)
        got = read_memory(tmp_path / "m")
        assert all(torch.equal(got[name], tensor) for name, tensor in named)
    publisher.close()
    assert [call[0] for call in cuda.calls] == ["register"]
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_without_cuda_no_memory_is_registered(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", None)
    publisher = in_memory(Engine(), tmp_path, checkpoint)
    publisher.publish(tensors(4), version=1)
    publisher.close()


def test_the_memory_transport_refuses_what_a_server_would_ignore(tmp_path, checkpoint):
    publisher = in_memory(Engine(), tmp_path, checkpoint)
    with pytest.raises(ValueError, match="no weight to publish"):
        publisher.publish([], version=1)
    with pytest.raises(ValueError, match="fused expert tensor"):
        publisher.publish([("mlp.experts.down_proj", torch.ones(2))], version=1)


class Holding(Fake):
    """A server with these checksums, and with those of the checkpoint once it has loaded one."""

    RIGHT = {"embed": "e", "experts": "x", "head": "h"}

    def __init__(self, **published):
        super().__init__(self.answer)
        self.held = {**self.RIGHT, **published}

    async def answer(self, request, _body):
        if request.path == "/update_weights_from_disk":
            self.held = self.RIGHT
        said = {"/model_info": {"weight_version": "3"}}
        said["/weights_checker"] = {"ranks": [{"checksums": self.held}]}
        return web.json_response(said.get(request.path, {"success": True, "message": ""}))


async def held_to_their_checkpoint(servers, tmp_path, checkpoint) -> Comparison:
    async with contextlib.AsyncExitStack() as stack:
        addrs = [await stack.enter_async_context(server.running()) for server in servers]
        with EngineControl(addrs) as control:
            reference = DiskPublisher(
                control, directory=tmp_path / "w", hf_checkpoint=checkpoint, bucket_bytes=40
            )
            return await asyncio.to_thread(
                compare_on_servers, control, reference, tensors(4), version=3
            )


async def test_of_two_servers_that_hold_the_actors_tensors_all_are_compared(tmp_path, checkpoint):
    found = await held_to_their_checkpoint([Holding(), Holding()], tmp_path, checkpoint)
    assert (found.sent, found.held, found.unlike) == (1, {0: 3, 1: 3}, {0: [], 1: []})
    found.require_equal(3)


@pytest.mark.parametrize("wrong", [0, 1])
async def test_one_wrong_tensor_of_one_server_of_two_is_named(wrong, tmp_path, checkpoint):
    servers = [Holding(**({"experts": "old"} if i == wrong else {})) for i in range(2)]
    message = rf"update 3: 1 of 3 tensors of engine {wrong} are not the actor's: rank 0 experts$"
    found = await held_to_their_checkpoint(servers, tmp_path, checkpoint)
    assert found.unlike[wrong] == ["rank 0 experts"] and not found.unlike[1 - wrong]
    with pytest.raises(AssertionError, match=message):
        found.require_equal(3)


def test_a_failed_load_keeps_the_version_that_the_servers_hold(tmp_path, checkpoint):
    publisher = DiskPublisher(
        Engine(), directory=tmp_path / "w", hf_checkpoint=checkpoint, bucket_bytes=40
    )
    publisher.publish(tensors(4), version=1)
    publisher._engine = Engine(refuse=True)
    with pytest.raises(RuntimeError, match="no"):
        publisher.publish(tensors(4), version=2)
    assert (tmp_path / "w" / "v000001").exists()


@pytest.fixture
def joins_end():
    """A join cannot be interrupted: wait until it has given up, or it would meet the interpreter's end."""
    yield
    for thread in threading.enumerate():
        if thread.name == "weight-group":
            thread.join(timeout=20)


@pytest.mark.usefixtures("joins_end")
def test_servers_take_their_ranks_one_after_another_and_a_refusal_ends_the_join():
    engine = Engine()
    publisher = DistributedPublisher(engine, bucket_bytes=8, group=BroadcastGroup(timeout_s=1))
    with pytest.raises(RuntimeError, match="backend not there"):
        publisher.connect()
    call = engine.calls[0]
    assert call["rank_offsets"] == [1, 3] and call["world_size"] == 4
    assert call["group_name"].startswith("r3train_weights_") and call["master_port"] > 0


@pytest.mark.usefixtures("joins_end")
def test_servers_are_told_the_given_address_and_the_store_listens_there_alone():
    engine = Engine()
    publisher = DistributedPublisher(
        engine, bucket_bytes=8, group=BroadcastGroup(timeout_s=1, master_address="127.0.0.2")
    )
    with pytest.raises(RuntimeError, match="backend not there"):
        publisher.connect()
    call = engine.calls[0]
    assert call["master_address"] == "127.0.0.2"
    socket.create_connection(("127.0.0.2", call["master_port"]), timeout=5).close()
    for elsewhere in ("127.0.0.1", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, call["master_port"]), timeout=5)


@pytest.mark.usefixtures("joins_end")
def test_a_server_whose_peer_dies_while_the_group_is_made_breaks_the_update_and_not_the_run():
    engine = Engine()
    engine.join_error = GroupBroken("reset by peer")
    publisher = DistributedPublisher(engine, bucket_bytes=8, group=BroadcastGroup(timeout_s=1))
    with pytest.raises(WeightUpdateError):
        publisher.connect()


class DyingEngine:
    """Servers of no rank, which load a first bucket and die in the second."""

    def __init__(self):
        self.loaded = [Future(), Future()]
        self.loaded[0].set_result(None)
        self.loaded[1].set_exception(RuntimeError("the server died"))

    def present(self):
        return []

    def update_group_sizes(self, servers):
        return []

    def init_weights_update_group(self, **_arguments):
        joined = Future()
        joined.set_result(None)
        return joined

    def update_weights_from_distributed(self, **_arguments):
        return self.loaded.pop(0)

    def check_alive(self):
        pass

    begin_weight_update = end_weight_update = check_alive


def test_a_group_that_failed_is_let_go_of_once_the_servers_are_new():
    """A server that lives waits at its connection, while the run still holds the error; and there may be many restarts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    open_files = lambda: len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(3):
            before = open_files()
            publisher = DistributedPublisher(DyingEngine(), bucket_bytes=8)
            with pytest.raises(RuntimeError, match="the server died") as _failure:
                publisher.publish(tensors(2, 2), version=1)
            assert open_files() > before
            publisher.reconnect()
            limit = time.monotonic() + 30
            while open_files() > before and time.monotonic() < limit:
                time.sleep(0.01)
            assert open_files() == before
    finally:
        gc.enable()
        dist.destroy_process_group()


def test_after_a_failed_broadcast_the_next_one_has_a_group_of_another_name(alone):
    """The next update comes without a restart where no server was left."""
    engine = DyingEngine()
    publisher = DistributedPublisher(engine, bucket_bytes=8)
    with pytest.raises(RuntimeError, match="the server died"):
        publisher.publish(tensors(2, 2), version=1)
    engine.loaded = [Future(), Future()]
    for loaded in engine.loaded:
        loaded.set_result(None)
    assert publisher.publish(tensors(2, 2), version=2).version == 2


class SlowEngine(DyingEngine):
    """Servers of no rank, which load a bucket when they are told to; ``log`` has what happened, in order."""

    def __init__(self, log):
        self.log, self.loading = log, Future()
        self.loading.set_result(None)

    def update_weights_from_distributed(self, names, weight_version, **_arguments):
        assert not self.log or self.log[-1] != "sent", "two buckets were sent at once"
        self.log.append("sent")
        self.names, self.version, self.loading = names, weight_version, Future()
        return self.loading

    def load(self):
        self.log.append("loaded")
        self.loading.set_result(None)

    def check_alive(self):
        if not self.loading.done():
            self.load()

    def end_weight_update(self):
        self.log.append("ended")

    def destroy_weights_update_group(self, group_name, servers):
        pass


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_bucket_is_made_while_the_one_before_it_is_sent(alone, monkeypatch):
    log = []
    engine, flat = SlowEngine(log), publish.flatten
    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)
    monkeypatch.setattr(publish, "flatten", lambda *how: log.append("made") or flat(*how))
    publisher = DistributedPublisher(engine, bucket_bytes=8)
    publisher.publish(tensors(2), version=1)  # a group's first broadcast is awaited
    log.clear()
    done = publisher.publish(tensors(2, 2, 2), version=2)
    later = ["made", "loaded", "sent"]
    assert log == ["made", "sent", *later, *later, "loaded", "ended"]
    assert (done.num_buckets, done.num_bytes, engine.version) == (3, 24, 2)
    publisher.close()


def test_a_group_made_after_a_restart_has_a_new_name(alone, monkeypatch):
    """A server that was not restarted refuses the name of a group that it knows."""
    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)
    names, engine = [], SlowEngine([])
    join = engine.init_weights_update_group

    def noted(**arguments):
        names.append(arguments["group_name"])
        return join(**arguments)

    monkeypatch.setattr(engine, "init_weights_update_group", noted)
    publisher = DistributedPublisher(engine, bucket_bytes=8)
    publisher.publish(tensors(2), version=1)
    publisher.publish(tensors(2), version=2)
    publisher.reconnect()
    publisher.publish(tensors(2), version=2)
    publisher.close()
    assert len(names) == len(set(names)) == 2


def test_two_buckets_take_turns_in_memory_that_stays_for_the_next_update(alone, monkeypatch):
    places, flat = [], publish.flatten
    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)

    def noted(bucket, memory):
        places.append((memory.data_ptr(), memory.nbytes))
        return flat(bucket, memory)

    monkeypatch.setattr(publish, "flatten", noted)
    publisher = DistributedPublisher(SlowEngine([]), bucket_bytes=8)
    publisher.publish(tensors(2, 2, 2, 1), version=1)
    publisher.publish(tensors(2, 2), version=2)
    assert places[0] != places[1]
    assert places == [*places[:2]] * 3
    publisher.publish(tensors(9), version=3)  # larger than a bucket
    assert places[-1][1] == 36
    publisher.close()


class LostEngine(SlowEngine):
    """A server that takes a request for its weights and dies before it takes part in the broadcast."""

    def check_alive(self):
        if self.log:
            raise EngineDied("the server died")


def test_a_server_that_dies_before_the_first_broadcast_is_noticed_at_once(alone, monkeypatch):
    """NCCL makes its communicators in the first broadcast: the call returns when all take part, or never."""
    ended, began = threading.Event(), []

    def broadcast(*_how, **_more):
        began.append(threading.current_thread())
        ended.wait(600)

    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)
    monkeypatch.setattr(publish.dist, "broadcast", broadcast)
    publisher = DistributedPublisher(LostEngine([]), bucket_bytes=8)
    late = threading.Timer(300, ended.set)  # where this thread waits, the test ends late and fails
    late.start()
    with pytest.raises(EngineDied, match="the server died"):
        publisher.publish(tensors(2, 2), version=1)
    assert not ended.is_set()
    assert began and began[0] is not threading.current_thread()
    late.cancel()
    ended.set()


def test_later_broadcasts_of_a_group_are_begun_here(alone, monkeypatch):
    threads, broadcast = [], publish.dist.broadcast

    def noted(*how, **more):
        threads.append(threading.current_thread().name)
        return broadcast(*how, **more)

    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)
    monkeypatch.setattr(publish.dist, "broadcast", noted)
    publisher = DistributedPublisher(SlowEngine([]), bucket_bytes=8)
    here = threading.current_thread().name
    publisher.publish(tensors(2, 2), version=1)
    publisher.publish(tensors(2, 2), version=2)
    assert threads == ["weight-group", here, here, here]
    publisher.close()
    publisher.publish(tensors(2), version=3)
    assert threads[4:] == ["weight-group"]
    publisher.close()


def test_a_tensor_that_cannot_be_had_leaves_the_group_in_step(alone, monkeypatch):
    def broken():
        yield from tensors(2, 2, 2)
        raise ValueError("not there")

    log = []
    monkeypatch.setattr(publish, "ALIVE_EVERY_S", 0.01)
    publisher = DistributedPublisher(SlowEngine(log), bucket_bytes=8)
    with pytest.raises(ValueError, match="not there"):
        publisher.publish(broken(), version=1)
    assert log == ["sent", "loaded", "ended"]
    group = publisher._group
    publisher.publish(tensors(2, 2), version=1)
    assert publisher._group is group and log.count("sent") == 3
    publisher.close()


def test_an_address_of_another_node_is_refused_by_name():
    publisher = DistributedPublisher(
        Engine(), bucket_bytes=8, group=BroadcastGroup(master_address="203.0.113.1")
    )
    with pytest.raises(ValueError, match="update_weight_master_address 203.0.113.1: this node"):
        publisher.connect()


def test_gloo_gets_the_interface_of_the_address_unless_one_is_named(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with publish.gloo_on("eth7"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with publish.gloo_on("eth7"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"

"""The directory of checkpoints: what a save puts in place, what it removes, what a cut leaves.

One process stands for all ranks, and the state is a file; what is in a checkpoint is looked at by
``tests/e2e/test_durability.py``.
"""

from r3train.cpu.device import prepare_device

prepare_device()

import io  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import random  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from r3train.config.checkpoint_settings import CheckpointSection  # noqa: E402
from r3train.launch.job.resume import ResumePoint  # noqa: E402
from r3train.loop.run_state import BUFFER_FILE, HAS_BUFFER  # noqa: E402
from r3train.trainer.megatron import checkpoint, rng, saved_state  # noqa: E402
from r3train.trainer.megatron.optimizer_state import OptimizerState  # noqa: E402


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(checkpoint, "host_barrier", lambda: None)
    monkeypatch.setattr(checkpoint, "rank_zero_alone", nullcontext)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)


def written(directory, number, which="", suffix=".tmp", **facts):
    path = directory / f"iter_{number:07d}{suffix}"
    path.mkdir(parents=True)
    put_state(path, number, which=which, **facts)
    return path


def put_state(path, number, **facts):
    state = {"num_rollouts": number, "weight_version": number, "topology": {"world_size": 1}}
    (path / "trainer_state.json").write_text(json.dumps(state | facts))


def switch(directory, number, keep_last=None, which=""):
    settings = CheckpointSection(save=directory, save_keep_last=keep_last)
    saver = checkpoint.Checkpointer(None, settings)
    saver._writing = written(directory, number, which)
    saver._switch(directory / f"iter_{number:07d}")


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_of_one_run_the_last_are_kept(tmp_path):
    for number in (1, 2, 3, 4):
        switch(tmp_path, number, keep_last=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", saved_state.LATEST]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_new_run_beside_one_that_got_further_keeps_both(tmp_path, keep_last):
    for number in (10, 20):
        switch(tmp_path, number)
    for number in (1, 2, 3):
        switch(tmp_path, number, keep_last=keep_last)
        assert saved_state.latest_checkpoint(tmp_path).name == f"iter_{number:07d}"
    kept = [f"iter_{n:07d}" for n in range(4 - keep_last, 4)]
    assert names(tmp_path) == [*kept, "iter_0000010", "iter_0000020", saved_state.LATEST]


@pytest.mark.parametrize("killed_in", ["rename", "_write_pointer", "remove_checkpoint"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_while_one_of_the_same_name_is_replaced_leaves_a_whole_one(
    tmp_path, monkeypatch, killed_in, call
):
    switch(tmp_path, 5, which="old")
    calls = []

    def killing(real):
        def instead(*arguments):
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return real(*arguments)

        return instead

    with monkeypatch.context() as patch:
        if killed_in == "rename":
            patch.setattr(checkpoint.Path, "rename", killing(checkpoint.Path.rename))
        else:
            patch.setattr(checkpoint, killed_in, killing(getattr(checkpoint, killed_in)))
        try:
            switch(tmp_path, 5, which="new")
        except KeyboardInterrupt:
            pass
    found = saved_state.read_state(saved_state.latest_checkpoint(tmp_path))
    assert found["which"] in ("old", "new")
    for leftover in tmp_path.glob("*.tmp"):
        checkpoint.remove_checkpoint(leftover)
    switch(tmp_path, 5, which="newest")
    assert saved_state.read_state(saved_state.latest_checkpoint(tmp_path))["which"] == "newest"
    assert names(tmp_path) == ["iter_0000005", saved_state.LATEST]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_that_before_the_pointer(
    tmp_path, monkeypatch
):
    """Only a power cut shows another order: the calls are recorded."""
    calls = []
    real = os.fsync, Path.rename, os.replace

    def fsync(handle):
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        real[0](handle)

    def rename(path, target):
        calls.append(("rename", path.name, target.name))
        return real[1](path, target)

    def replace(path, target):
        calls.append(("rename", Path(path).name, Path(target).name))
        real[2](path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(os, "replace", replace)
    switch(tmp_path, 7)
    directory, pointer = ("sync", tmp_path.name), saved_state.LATEST
    named = calls.index(("rename", "iter_0000007.tmp", "iter_0000007"))
    files = {"iter_0000007.tmp", "trainer_state.json", saved_state.CHECKSUMS}
    assert {name for _, name in calls[:named]} == files
    assert calls[named + 1 :] == [
        directory,
        ("sync", f"{pointer}.tmp"),
        ("rename", f"{pointer}.tmp", pointer),
        directory,
    ]


def test_where_a_run_began_its_checkpoint_has_only_its_samples_renewed(tmp_path):
    final = written(tmp_path, 5, "untouched", suffix="")
    saver = checkpoint.Checkpointer(None, CheckpointSection(save=tmp_path), resumed_at=5)
    saver.save(5, {}, lambda directory: (directory / BUFFER_FILE).write_text("new"))
    assert saved_state.read_state(final)["which"] == "untouched"
    assert (final / BUFFER_FILE).read_text() == "new"


def test_only_a_checkpoint_of_the_same_directory_is_renewed(tmp_path):
    at = ResumePoint(tmp_path / "ck" / "iter_0000005", start_rollout_id=5)
    assert at.next_rollout_in(tmp_path / "x" / ".." / "ck") == 5
    assert at.next_rollout_in(tmp_path / "other") is None
    aside = ResumePoint(tmp_path / "ck" / "iter_0000005.old", start_rollout_id=5)
    assert aside.next_rollout_in(tmp_path / "ck") is None
    assert ResumePoint(at.checkpoint, model_only=True).next_rollout_in(tmp_path / "ck") is None


def test_a_buffer_that_is_gone_is_missed(tmp_path):
    path = written(tmp_path, 5, suffix="", **{HAS_BUFFER: True})
    with pytest.raises(ValueError, match=rf"{BUFFER_FILE}: missing, .* lost or trained twice"):
        ResumePoint(path, start_rollout_id=5).buffer(64)
    put_state(path, 5, **{HAS_BUFFER: False})
    assert ResumePoint(path, start_rollout_id=5).buffer(64) is None


def random_values():
    tracker = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork("model-parallel-rng"):
        forked = torch.rand(3).tolist()
    return [torch.rand(3).tolist(), forked, np.random.rand(3).tolist(), random.random()]


def test_the_random_state_of_a_rank_goes_on_where_it_was_saved(tmp_path):
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    random.gauss(0, 1), np.random.randn()  # both keep a second number for the next call
    rng.save(tmp_path, 0)
    expected = random_values()
    assert random_values() != expected, "the states move"
    rng.load(tmp_path, 0)
    assert random_values() == expected


@pytest.mark.parametrize("content", [None, b"", b"not safetensors"])
def test_a_random_state_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "rng_00003.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="rng_00003.safetensors: cannot read the random state"):
        rng.load(tmp_path, 3)


class Run:
    def __reduce__(self):
        return print, ("code of a checkpoint ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Run()), pickle.dumps({"a": Run()}), b"", b"\x80"])
def test_metadata_that_names_anything_but_torchs_descriptions_is_refused(content, tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata: refused"):
        checkpoint.check_metadata(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_checkpoint_whose_metadata_runs_code_in_torchs_own_reader_runs_none_here(
    tmp_path, capsys
):
    """The attack: torch's description of a checkpoint, whole, with a call next to it."""
    metadata = Metadata(state_dict_metadata={}, planner_data=Run())
    put_state(tmp_path, 3)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata == {}
    assert capsys.readouterr().out == "code of a checkpoint ran\n", "the attack is one"
    with pytest.raises(ValueError, match=r"\.metadata: refused: .* it names builtins.print"):
        checkpoint.load_checkpoint(None, tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("chunks", [[(0, 2)], [(0, 2), (0, 2)], []])
def test_a_tensor_of_which_a_part_is_missing_does_not_load(chunks, tmp_path):
    """As a writer that saves one rank's experts leaves it."""
    properties = TensorProperties(torch.float32)
    chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([n, 3])) for at, n in chunks]
    tensor = TensorStorageMetadata(properties, torch.Size([4, 3]), chunks)
    put_state(tmp_path, 3)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"decoder.experts": tensor})))
    there = 6 if chunks else 0
    said = rf"\.metadata: of decoder.experts {there} numbers are there, expected 12"
    with pytest.raises(ValueError, match=said):
        checkpoint.load_checkpoint(None, tmp_path)


def test_values_beside_the_tensors_run_no_code(capsys):
    def stored(value):
        file = io.BytesIO()
        torch.save(value, file)
        return io.BytesIO(file.getvalue())

    with checkpoint.no_code_from_files():
        assert torch.load(stored([None, torch.ones(2)]), weights_only=False)[0] is None
        with pytest.raises(pickle.UnpicklingError):
            torch.load(stored([Run()]), weights_only=False)
    assert capsys.readouterr().out == ""
    torch.load(stored([Run()]), weights_only=False)
    assert capsys.readouterr().out == "code of a checkpoint ran\n"


@pytest.fixture
def alone_in_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_tensor_with_a_hole_is_not_saved(alone_in_a_group, tmp_path, monkeypatch):
    half = ShardedTensor.from_rank_offsets("experts", torch.ones(2), (0, 0, 2))
    actor = SimpleNamespace(gather_parameters=lambda: None)
    monkeypatch.setattr(checkpoint, "whole_state", lambda actor: {"experts": half})
    monkeypatch.setattr(checkpoint, "write_state", lambda *_: None)
    saver = checkpoint.Checkpointer(actor, CheckpointSection(save=tmp_path))
    with pytest.raises(checkpoint.CheckpointError, match="experts"):
        saver.save(1, {})
    assert names(tmp_path) == []


def test_a_checkpoint_whose_layers_state_runs_code_runs_none_here(
    alone_in_a_group, tmp_path, monkeypatch, capsys
):
    """The attack: a whole checkpoint of Megatron's, whose extra state of a layer is a call."""

    def extra(value):
        return {"model": {"a._extra_state": ShardedObject("a._extra_state", value, (1,), (0,))}}

    put_state(tmp_path, 3)
    dist_checkpointing.save(extra(Run()), str(tmp_path))
    capsys.readouterr()
    dist_checkpointing.load(extra(None), str(tmp_path))
    assert capsys.readouterr().out == "code of a checkpoint ran\n", "the attack is one"
    monkeypatch.setattr(checkpoint, "model_state", lambda _: extra(None))
    with pytest.raises(ValueError, match="cannot be loaded: Unsupported global: GLOBAL print was"):
        checkpoint.load_checkpoint(None, tmp_path, model_only=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("precision_aware, on_host", [(False, False), (True, True), (True, False)])
def test_an_adam_that_holds_the_weights_itself_resumes_from_no_checkpoint_without_them(
    precision_aware, on_host, monkeypatch
):
    weights = ShardedTensor.from_rank_offsets("optimizer.state.param.w", torch.zeros(2))
    config = SimpleNamespace(
        use_precision_aware_optimizer=precision_aware, optimizer_cpu_offload=on_host
    )
    part = SimpleNamespace(optimizer=None, config=config)
    optimizer = SimpleNamespace(
        chained_optimizers=[part],
        param_groups=[],
        sharded_state_dict=lambda *_, **__: {"param": weights},
    )
    saved = ["w"]
    monkeypatch.setattr(dist_checkpointing, "load_tensors_metadata", lambda _: saved)
    match = lambda: OptimizerState(optimizer, {}, is_loading=True).match("saved")
    if precision_aware and not on_host:
        with pytest.raises(ValueError, match="^saved: has no float32 weights next to the model's"):
            match()
        saved.append(weights.key)
    match()


def saved_alone(directory, monkeypatch, *, is_async, elements=1000):
    """A checkpoint of one tensor, saved by a ``Checkpointer`` of one rank."""
    topology = dict.fromkeys(("world_size", "tp_size", "pp_size", "cp_size", "ep_size"), 1)
    topology = SimpleNamespace(**topology, vpp_size=None, etp_size=1)
    actor = SimpleNamespace(topology=topology, gather_parameters=lambda: None)
    values = torch.arange(elements, dtype=torch.float32)
    state = lambda _: {"a": ShardedTensor.from_rank_offsets("a", values)}  # noqa: E731
    monkeypatch.setattr(checkpoint, "whole_state", state)
    monkeypatch.setattr(checkpoint, "model_state", state)
    saver = checkpoint.Checkpointer(
        actor, CheckpointSection(save=directory, async_save=is_async, save_interval=1)
    )
    saver.save(3, {}, lambda path: (path / BUFFER_FILE).write_bytes(b"samples"))
    saver.finish()
    return saved_state.latest_checkpoint(directory)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_bit_of_any_file_of_a_checkpoint_is_noticed_before_it_is_loaded(
    alone_in_a_group, tmp_path, monkeypatch, is_async
):
    summed_here, summed = [], checkpoint.checksums

    def noted(directory, names):
        names = list(names)
        summed_here.extend(names)
        return summed(directory, names)

    monkeypatch.setattr(checkpoint, "checksums", noted)
    path = saved_alone(tmp_path, monkeypatch, is_async=is_async)
    files = {p.name for p in path.iterdir()}
    written = {"__0_0.distcp", "rng_00000.safetensors"}
    shared = {".metadata", "metadata.json", "trainer_state.json"}
    assert files == written | shared | {BUFFER_FILE, saved_state.CHECKSUMS}
    # each file once; with an asynchronous save the forked writer sums what it has written
    assert sorted(summed_here) == sorted(shared if is_async else shared | written)
    assert saved_state.read_checksums(path).keys() == shared | written
    for name in sorted(shared | written):
        content = (path / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        (path / name).write_bytes(flipped)
        with pytest.raises(ValueError, match=f"{path / name}: damaged: [^\n]*$"):
            checkpoint.load_checkpoint(None, path)
        (path / name).write_bytes(content)
    # a file of the samples may be replaced later
    (path / BUFFER_FILE).write_bytes(b"more samples")
    checkpoint.check_files(path)
    # of an earlier version
    (path / saved_state.CHECKSUMS).unlink()
    (path / "metadata.json").write_bytes(b"other")
    checkpoint.check_files(path)


@pytest.mark.parametrize("name", ["metadata.json", "__0_0.distcp", "rng_00000.safetensors"])
def test_a_fifo_in_a_checkpoint_is_refused_with_and_without_checksums(
    alone_in_a_group, tmp_path, monkeypatch, name
):
    path = saved_alone(tmp_path, monkeypatch, is_async=False)
    (path / name).unlink()
    os.mkfifo(path / name)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{path / name}: is a FIFO, expected a regular file"):
            checkpoint.load_checkpoint(None, path)
        (path / saved_state.CHECKSUMS).unlink(missing_ok=True)


def test_a_failure_at_the_end_of_a_save_leaves_the_checkpoint_before_it(
    alone_in_a_group, tmp_path, monkeypatch
):
    def full(_):
        raise OSError(28, "No space left on device", "checksums.json")

    saved_alone(tmp_path, monkeypatch, is_async=False)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checksums", full)
        for is_async in (False, True):
            with pytest.raises(checkpoint.CheckpointError, match="No space left .*after 3 roll"):
                saved_alone(tmp_path, patch, is_async=is_async)
    assert names(tmp_path) == ["iter_0000003", saved_state.LATEST]

"""The way of CUDA handles to SGLang without a pickle, with a host's memory.

SGLang's own request, updater and worker; the memory is one that another process could open by name, as
cudaIpcOpenMemHandle would.  The reader that the design asks for stands here.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.engine.publish import flatten

declare_torchvision_ops()

from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput  # noqa: E402
from sglang.srt.model_executor.model_runner_components import weight_updater  # noqa: E402
from sglang.srt.platforms import current_platform  # noqa: E402
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: E402

BUCKET = [
    ("model.norm.weight", torch.arange(64).bfloat16()),
    ("model.layers.0.mlp.experts.1.down_proj.weight", torch.randn(8, 6).bfloat16()),
]


def read(_context, handle, *, device_id, run, post_hook):
    """Stand in for checkpoint_engine's function: open the memory that ``handle`` describes, and load it."""
    said = json.loads(handle)
    bucket = FlattenedTensorBucket.empty(said["names"], said["dtypes"], said["shapes"], "meta")
    size = bucket.get_flattened_tensor().nbytes
    with open(f"/proc/{said['pid']}/fd/{said['fd']}", "r+b") as file:
        if not size <= said["bytes"] <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"tensors of {size} bytes in memory of {said['bytes']}")
        memory = mmap.mmap(file.fileno(), said["bytes"])
    bucket.flattened_tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    run(bucket.reconstruct_tensors())


@pytest.fixture
def handle():
    """The handle of memory with the bucket in it."""
    size = sum(tensor.nbytes for _, tensor in BUCKET)
    file = os.memfd_create("bucket")
    os.ftruncate(file, size)
    flatten(BUCKET, torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8))
    yield dict(
        pid=os.getpid(),
        fd=file,
        bytes=size,
        names=[name for name, _ in BUCKET],
        dtypes=["bfloat16"] * len(BUCKET),
        shapes=[list(tensor.shape) for _, tensor in BUCKET],
    )
    os.close(file)


@pytest.fixture
def update(monkeypatch):
    """Send a handle in a request; returns SGLang's answer and what its model was given."""
    reader = ModuleType("checkpoint_engine.worker")
    reader.update_weights_from_ipc = read
    monkeypatch.setitem(sys.modules, "checkpoint_engine", ModuleType("checkpoint_engine"))
    monkeypatch.setitem(sys.modules, "checkpoint_engine.worker", reader)
    loaded = {}

    class Model(torch.nn.Module):
        def load_weights(self, weights):
            loaded.update((name, tensor.clone()) for name, tensor in weights)

    model = Model()
    updater = weight_updater.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=lambda: SimpleNamespace(model=model),
    )
    monkeypatch.setattr(
        weight_updater, "get_model", lambda: SimpleNamespace(weight_cache_mode="off")
    )

    def unpickle(*_):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, unpickle)
    monkeypatch.setattr(weight_updater.MultiprocessingSerializer, "deserialize", unpickle)

    def send(handle):
        device = f"GPU-{current_platform.get_device_uuid(0)}"
        request = UpdateWeightsFromIPCReqInput(zmq_handles={device: json.dumps(handle)})
        return updater.update_weights_from_ipc(request), loaded

    return send


def test_a_bucket_comes_whole_by_sglangs_own_call(handle, update):
    answer, loaded = update(handle)
    assert answer == (True, "IPC weight update completed successfully")
    assert loaded.keys() == dict(BUCKET).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in BUCKET)


@pytest.mark.parametrize(
    "change", [{"shapes": [[64], [8, 600]]}, {"bytes": 1 << 40}, {"dtypes": ["bfloat16"]}]
)
def test_a_handle_that_does_not_fit_its_memory_loads_nothing(change, handle, update):
    (success, message), loaded = update(handle | change)
    assert not success and message and not loaded

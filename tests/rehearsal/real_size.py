"""Ranks of a recipe, built at real size on the meta device, with groups that send nothing.

    python -m tests.rehearsal.real_size REPORT RECIPE[:RANK,RANK...][?KEY=NUMBER] ...

``build_model`` is production's.  It loads from tensors that have the checkpoint's names and
shapes and no content; instead of a scatter, the part for this rank is compared with its parameter.
Layers are those that run on CUDA, of ``stand_ins/transformer_engine.py`` on PYTHONPATH.  KEY of config.json
gets another NUMBER for the actor only.

The optimizer is production's too.  Its step is taken, so that all it makes is there; that of torch's AdamW on the
host is left out for what it makes, its moments.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from r3train.cpu.device import prepare_device

prepare_device()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from r3train.config import RunConfig  # noqa: E402
from r3train.families.read_facts import read_hf_facts  # noqa: E402
from r3train.cpu.torchvision_stub import declare_torchvision_ops  # noqa: E402
from tests.published import RECIPES, Recipe, shapes_of, write_config  # noqa: E402
from tests.rehearsal.loss_memory import Account  # noqa: E402

declare_torchvision_ops()

from megatron.core import parallel_state  # noqa: E402

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402

from r3train.trainer.megatron import hf_weights, model, optimizer, topology  # noqa: E402
from r3train.trainer.megatron.optimizer_state import _create_moments  # noqa: E402

META = torch.device("meta")


class Places(Account):
    """Bytes on the device, and those of tensors that were brought to the host and of all made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, int] = {}
        self._of_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.host:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self._of_host |= not all(map(self.on_device, given))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._of_host = False

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if storage.device != META:
            return
        if not self._of_host:
            super()._note(storage)
        elif key not in self._seen and key not in self.host:
            self.host[key] = storage.nbytes()
            weakref.finalize(storage, self.host.pop, key)

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self.host

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._of_host = True
        return torch.empty_like(tensor)


def rehearse(recipe: Recipe, ranks: list[int], changes: dict[str, int]) -> list[dict[str, Any]]:
    """Tensors that each rank loaded and numbers that it holds; without ``ranks``, the first rank's only."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / recipe.model
        write_config(directory, recipe.model)
        shapes, hf = shapes_of(directory), read_hf_facts(directory)
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        config = RunConfig.from_toml(
            recipe.path, {"hf_checkpoint": str(directory), "attention_backend": "te"}
        )
        try:
            return [_rank(recipe, rank, config, hf, shapes) for rank in ranks or [0]]
        except ValueError as error:  # tensors of other shapes than config.json's
            return [{"misfits": [str(error)]}]


def _rank(recipe: Recipe, rank: int, config: RunConfig, hf: Any, shapes: dict) -> dict[str, Any]:
    with Places() as places, built_rank(recipe, rank, config, hf, shapes) as (built, found):
        parameters = [p for chunk in built.unwrapped for p in chunk.parameters()]
        buffers = {p.main_grad.untyped_storage() for p in parameters}
        gradients = sum(buffer.nbytes() for buffer in buffers)
        found |= {"weights": places.live - gradients, "gradients": gradients}
        return found | step(config, built.chunks, places)


def step(config: RunConfig, chunks: list[Any], places: Places) -> dict[str, int]:
    """Bytes that the optimizer holds after its first step, on the device and on the host, and during it."""
    before = places.live
    told = {
        "is_cuda": property(places.on_device),
        "cpu": lambda tensor: places.to_host(tensor),
        "pin_memory": lambda tensor: tensor,
        "type": lambda tensor: type_of(tensor).replace("meta.", ""),
    }
    with patch.multiple(torch.Tensor, **told):
        built = optimizer.build_optimizer(config, chunks)
        places.peak = places.live
        for part in built.chained_optimizers:
            part._copy_model_grads_to_main_grads()
            if not isinstance(part.optimizer, HybridDeviceOptimizer):
                part.optimizer.step()
                continue
            with patch("torch.empty", lambda *of, **_: places.to_host(empty(*of, device=META))):
                part.optimizer._set_sub_optimizer_grads()
            _create_moments(part.optimizer)
    gc.collect()  # Megatron makes the one with its state on the host twice, and the first is a cycle
    return {
        "optimizer": places.live - before,
        "offloaded": sum(places.host.values()),
        "step": places.peak - places.live,
    }


@contextmanager
def built_rank(
    recipe: Recipe, rank: int, config: RunConfig, hf: Any, shapes: dict
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Build a rank's model; yields it with what it loaded."""
    names: list[str] = []
    misfits: list[str] = []

    def read(_: Any, name: str, expert: int | None = None) -> torch.Tensor:
        if expert is None or name not in names:  # of all experts' tensor each is read by itself
            names.append(name)
        shape = shapes[name] if expert is None else shapes[name][1:]
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    def scatter(
        out: torch.Tensor, parts: list[torch.Tensor] | None, *, group: Any, group_src: int
    ) -> None:
        part = parts[group.rank()] if parts is not None else out
        if part.shape != out.shape:
            misfits.append(f"{tuple(part.shape)} for {tuple(out.shape)}")

    hf_weights.CheckpointTensors.read, dist.scatter = read, scatter
    dist.broadcast = lambda *_, **__: None
    dist.init_process_group("fake", rank=rank, world_size=recipe.num_gpus, store=FakeStore())
    try:
        place = topology.init_model_parallel(config.parallel, config.trainer.seed)
        reads_experts = parallel_state.get_expert_data_parallel_rank() == 0
        built = model.build_model(config, hf, META)
        yield built, {
            "rank": rank,
            "stage": place.pp_rank,
            "ep_rank": place.ep_rank,
            "reads_experts": reads_experts,
            "names": names,
            "misfits": misfits,
        }
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


empty, type_of = torch.empty, torch.Tensor.type
dist.all_gather_object = lambda found, own, group=None: found.__setitem__(
    slice(None), [own] * len(found)
)
torch.cuda.current_device = lambda: META
torch.Tensor.normal_ = lambda self, *_, **__: self  # slow on the meta device

if __name__ == "__main__":
    found = {}
    for word in sys.argv[2:]:
        place, _, change = word.partition("?")
        file, _, ranks = place.partition(":")
        key, _, number = change.partition("=")
        (recipe,) = (r for r in RECIPES if r.file == file)
        changes = {key: int(number)} if key else {}
        found[word] = rehearse(recipe, [int(rank) for rank in ranks.split(",") if rank], changes)
    Path(sys.argv[1]).write_text(json.dumps(found))

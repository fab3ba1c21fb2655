"""SGLang's own decisions on a GPU: its resolved arguments for every recipe, and which backends record routes.

    python -m tests.rehearsal.gpu_servers REPORT CARD DIRECTORY

CARD is a name of ``CARDS``.  torch and SGLang are made to believe in it, and packages of kernels that are not
installed import as empty ones.  The command lines are production's (``SGLangServer.command``), and SGLang's own
parser and ``resolve_once`` read them.  DIRECTORY gets the published config.json files.

REPORT: {"servers": {recipe: {argument: value, and experts of a GPU, their columns, whether SGLang finds blocks
tuned for them}}, "alone": {recipe: the backend of experts that SGLang takes
without our flag}, "records": {backend of experts: it records routes}}.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import types
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.engine.server import SGLangServer
from r3train.launch.gpus import gpu_flags
from r3train.launch.start.local_servers import build_server, _server_args
from tests.published import MOE_RECIPES, Recipe, write_config

declare_torchvision_ops()  # before SGLang imports transformers

MIB = 1 << 20
# the arguments that the page and the tests look at
SHOWN = (
    "moe_runner_backend",
    "disable_overlap_schedule",
    "mem_fraction_static",
    "tp_size",
    "enable_tf32_matmul",
    "attention_backend",
    "prefill_attention_backend",
    "dtype",
    "decode_attention_backend",
    "disable_shared_experts_fusion",
    "chunked_prefill_size",
    "flashinfer_allreduce_fusion_backend",
    "enable_return_routed_experts",
)
# GPUs of a served server whose recipe names no command for it
SERVED_GPUS = {
    "qwen3_30b_a3b": 2,
    "qwen3_30b_a3b_two_nodes": 4,
    "qwen3_5_35b_a3b_two_nodes": 4,
}
_KERNELS = frozenset(
    "sgl_kernel flashinfer deep_gemm deep_ep flash_mla triton_kernels cutlass humming quack tilelang"
    " flash_attn nvshmem sgl_flash_mla mooncake nvidia_cutlass".split()
)
_KERNEL_PACKAGES = (
    "flashinfer_python",
    "flashinfer-python",
    "sglang-kernel",
    "sgl-kernel",
    "nvidia-cutlass-dsl",
)


@dataclass(frozen=True)
class Card:
    """A GPU as torch and nvidia-smi describe it."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    driver: str = "580.95.05"


CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", (9, 0), 81559),
    "H200": Card("NVIDIA H200", (9, 0), 143771),
    "B200": Card("NVIDIA B200", (10, 0), 183359),
}


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import packages of kernels as modules that have every name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _AnyModule(spec.name)
        module.__path__, module.__version__ = [], "9.9.9"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _AnyModule(types.ModuleType):
    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return getattr(self, name)


def believe_in(card: Card) -> None:
    """Make torch, nvidia-smi and the versions of kernel packages those of a node with eight of these cards."""
    facts = SimpleNamespace(
        name=card.name,
        total_memory=card.memory_mib * MIB,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=132,
        gcnArchName="",
        warp_size=32,
        shared_memory_per_block_optin=232448,
    )
    free = (card.memory_mib * MIB, card.memory_mib * MIB)
    answers = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "is_initialized": True,
        "get_device_capability": card.capability,
        "get_device_properties": facts,
        "get_device_name": card.name,
        "mem_get_info": free,
        "get_arch_list": ["sm_90"],
        **dict.fromkeys(("_lazy_init", "set_device", "empty_cache")),
    }
    torch.version.cuda = "13.0"
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_a, _answer=answer, **_k: _answer)
    folder = Path(tempfile.mkdtemp(prefix="nvidia_smi_"))
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n*memory.total*) echo {card.memory_mib};;\n'
        f"*driver_version*) echo {card.driver};;\n*) exit 9;;\nesac\n"
    )
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    sys.meta_path.insert(0, _Kernels())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        "9.9.9" if name in _KERNEL_PACKAGES else version(name)
    )


def server_of(recipe: Recipe, directory: Path) -> SGLangServer:
    """The server that a recipe's run starts, or that ``r3train serve`` starts for it."""
    config = RunConfig.from_toml(recipe.path)
    model = directory / config.model.hf_checkpoint
    if not model.exists():
        write_config(model, recipe.model)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"hf_checkpoint": model})}
    )
    if config.rollout.rollout_external_engine_addrs:
        text = recipe.path.read_text()
        found = re.search(r"r3train serve .*--num-gpus (\d+)(?: --sglang-nnodes (\d+))?", text)
        gpus, nodes = found.groups() if found else (SERVED_GPUS[recipe.file], None)
        args: dict[str, object] = dict(config.rollout.sglang)
        if nodes:
            args |= {"nnodes": int(nodes), "node_rank": 0, "dist_init_addr": "node:25000"}
        args |= gpu_flags(args, num_gpus=int(gpus), local_index=0, num_visible=8)
    else:
        args = _server_args(config, 0, [range(4, 8)])
    hf = read_hf_facts(model)
    return build_server(config, hf, Path("sglang.log"), args, 0, port=25321, device="cuda")


def resolved(command: list[str]) -> dict[str, Any]:
    """Resolve a server's command line as SGLang does: the arguments of ``SHOWN``, and its CUDA graphs."""
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(command[command.index("r3train.engine.launch_server") + 1 :])
    args.resolve_once()
    values = args.resolved_dict()
    graphs = {
        phase: {key: values["cuda_graph_config"][phase].get(key) for key in ("backend", "max_bs")}
        for phase in ("prefill", "decode")
    }
    return {**{name: values[name] for name in SHOWN}, "cuda_graphs": graphs}


def tuned(server: SGLangServer, values: dict[str, Any]) -> dict[str, Any]:
    """Ask SGLang for the experts of a GPU and their columns, and whether it finds blocks tuned for them on this card.

    values: of ``resolved``.
    """
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as search

    moe = SimpleNamespace(
        disable_shared_experts_fusion=values["disable_shared_experts_fusion"],
        enforce_shared_experts_fusion=False,
        enable_waterfill=False,
    )
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    answers = {
        "get_exec": SimpleNamespace(moe=moe, deterministic=deterministic),
        "get_parallel": SimpleNamespace(moe_ep_size=1),
        "is_sbo_enabled": False,
        "is_tbo_enabled": False,
        "is_deepep_class_backend": False,
        "get_moe_a2a_backend": MagicMock(**{"is_deepep.return_value": False}),
    }
    answers["get_moe_a2a_backend"].is_mori.return_value = False
    keys = json.loads((Path(server.model_path) / "config.json").read_text())
    model = _class_of(keys["architectures"][0])
    places = [utils, search, *{sys.modules[base.__module__] for base in model.__mro__[:-1]}]
    with ExitStack() as stack:
        for place in places:
            for name, answer in answers.items():
                if hasattr(place, name):
                    stack.enter_context(patch.object(place, name, lambda _answer=answer: _answer))
        fused = utils.resolve_shared_experts_config(model, SimpleNamespace(**keys), None)
        text = keys.get("text_config", keys)
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        count = next(text[name] for name in names if text.get(name))
        columns = text.get("moe_intermediate_size") or text["intermediate_size"]
        experts = count + fused.num_fused_shared_experts, columns // values["tp_size"]
        found = search.get_moe_configs(*experts, None)
    return {"experts": experts, "is_tuned": found is not None}


def _class_of(architecture: str) -> type:
    """Import SGLang's model of this name from the file that defines it."""
    import sglang.srt.models

    folder = Path(sglang.srt.models.__path__[0])
    for file in sorted(folder.glob("*.py")):
        if re.search(rf"^class {architecture}\b", file.read_text(encoding="utf-8"), re.M):
            return getattr(importlib.import_module(f"sglang.srt.models.{file.stem}"), architecture)
    raise ValueError(f"{folder}: no class {architecture}, expected one")


def records_routes() -> dict[str, bool]:
    """Say for every backend of experts whether SGLang's own ``TopK`` hands its choice to the capturer.

    A backend records only if it does with every way of routing that SGLang has.
    """
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType

    seen: list[int] = []
    capturer = SimpleNamespace(capture=lambda layer_id, topk_indices: seen.append(layer_id))
    select = topk.select_experts

    def on_the_host(*args: Any, topk_config: Any, **others: Any) -> Any:
        topk_config.torch_native = True  # its kernels are CUDA's; the call after them is the same
        return select(*args, topk_config=topk_config, **others)

    shared = SimpleNamespace(use_waterfill=False, num_shared_topk_slots=0)
    replaced = {
        "get_global_experts_capturer": lambda: capturer,
        "resolve_routing_inputs": lambda **_: (None, None),
        "routing": lambda *_a, **_k: (None,) * 5,
        "get_model": lambda: SimpleNamespace(shared_experts=shared),
        "get_flags": lambda: SimpleNamespace(moe=SimpleNamespace(in_speculative_scope=False)),
        "get_lora": lambda: SimpleNamespace(enable_lora=False),
        "get_parallel": lambda: SimpleNamespace(tp_group=None),
        "is_allocation_symmetric": lambda: False,
        "use_symmetric_memory": lambda *_a, **_k: nullcontext(),
        "select_experts": on_the_host,
    }
    torch._dynamo.config.disable = True  # what it would compile for is not here
    found = {}
    patches = [patch.object(topk, name, new, create=True) for name, new in replaced.items()]
    for one in patches:
        one.start()
    for backend in MoeRunnerBackend:
        ways = []
        for method in (None, *RoutingMethodType):
            seen.clear()
            layer = topk.TopK(2, layer_id=0, renormalize=True)
            layer.bind_runner_backend(backend, routing_method_type=method)
            layer.forward_cuda(torch.randn(4, 16), torch.randn(4, 8))
            ways.append(bool(seen))
        found[backend.value] = all(ways)
    for one in patches:
        one.stop()
    return found


def main(report: str, card: str, directory: str) -> None:
    believe_in(CARDS[card])
    servers, alone = {}, {}
    for recipe in MOE_RECIPES:
        server = server_of(recipe, Path(directory))
        command = server.command()
        override = server.environment().get("NVIDIA_TF32_OVERRIDE")
        values = resolved(command)
        values |= tuned(server, values)
        servers[recipe.file] = {**values, "NVIDIA_TF32_OVERRIDE": override}
        at = command.index("--moe-runner-backend")
        alone[recipe.file] = resolved(command[:at] + command[at + 2 :])["moe_runner_backend"]
    found = {"servers": servers, "alone": alone, "records": records_routes()}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

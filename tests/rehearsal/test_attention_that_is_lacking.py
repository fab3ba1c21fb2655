"""Attention for which Transformer Engine has no kernel: refused at the start, and by its stand-in at the call."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r3train.config import RunConfig
from r3train.cpu import device as cpu_device
from r3train.launch.job import model_checks
from r3train.verify.topologies import TOPOLOGIES
from r3train.verify.verifier import Verifier
from tests.published import RECIPES

STAND_IN = Path(__file__).parent / "stand_ins/transformer_engine.py"
BASE = {"hf_checkpoint": "none", "prompt_data": "none", "num_rollout": 1, "rollout_batch_size": 1}
BASE |= {"n_samples_per_prompt": 1, "rollout_max_response_len": 8}


@pytest.fixture
def engine(monkeypatch) -> Any:
    """The stand-in, of which no other module knows."""
    spec = importlib.util.spec_from_file_location("transformer_engine", STAND_IN)
    module = importlib.util.module_from_spec(spec)
    for name in ("", ".common", ".pytorch"):  # its parts register themselves
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    spec.loader.exec_module(module)
    return module


def kernels(engine: Any, config: RunConfig, *, has_sinks: bool, version: str = "2.12.0") -> set:
    engine.__version__ = version
    parallel, overrides = config.parallel, config.model.transformer_overrides
    of = SimpleNamespace(
        cp_size=parallel.context_parallel_size,
        softmax_type="learnable" if has_sinks else "vanilla",
        cp_comm_type=overrides.get("cp_comm_type", "p2p"),
    )
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    return engine.DotProductAttention._backends(of, dtype)


def is_refused(config: RunConfig, *, has_sinks: bool, version: str) -> bool:
    try:
        model_checks.check_layers_here(config)
        if has_sinks:
            model_checks.check_sinks("gpt_oss", version, config)
    except ValueError:
        return True
    return False


def test_a_start_refuses_what_has_no_kernel_and_nothing_else(engine, monkeypatch):
    monkeypatch.setattr(model_checks, "visible_gpus", lambda: [0, 1])
    monkeypatch.setattr(cpu_device, "uses_transformer_engine", lambda *_, **__: True)
    lacking = 0
    for bf16, cp, sinks, exchange, version in product(
        (True, False), (1, 2), (True, False), (None, "p2p", "a2a"), ("2.11.0", "2.12.0", "2.20.1")
    ):
        overrides = {"cp_comm_type": exchange} if exchange else {}
        given = {"bf16": bf16, "context_parallel_size": cp, "transformer_overrides": overrides}
        config = RunConfig.from_sources(flags=BASE | given)
        found = kernels(engine, config, has_sinks=sinks, version=version)
        assert is_refused(config, has_sinks=sinks, version=version) == (not found), (given, sinks)
        lacking += not found
    assert lacking == 31


def test_no_recipe_and_no_topology_of_verify_asks_for_it(engine, monkeypatch, tmp_path):
    for recipe in RECIPES:
        config = RunConfig.from_toml(recipe.path)
        assert kernels(engine, config, has_sinks=recipe.model.startswith("gpt-oss")), recipe.file
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused = {}
    for bf16 in (True, False):
        verifier = Verifier(tmp_path, bf16=bf16, max_world_size=8, report=print)
        for topology in TOPOLOGIES.values():
            parallel = topology.parallel | {"bf16": bf16}
            config = RunConfig.from_sources(flags=BASE | parallel)
            lacks = not kernels(engine, config, has_sinks=False)
            assert bool(verifier._obstacle(topology)) == lacks, (topology.name, bf16)
            refused[bf16] = refused.get(bf16, 0) + lacks
    assert refused[True] == 0 < refused[False]

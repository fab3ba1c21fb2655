"""Topologies of ``r3train verify`` that CI does not run: at least their layers can be placed."""

from types import SimpleNamespace

import pytest
import torch

from r3train.config.model_settings import ModelSection
from r3train.verify import runner
from r3train.verify.model_zoo import VARIANTS
from r3train.verify.topologies import TOPOLOGIES
from r3train.verify.verifier import Verifier


@pytest.mark.parametrize("bf16", [False, True])
def test_float32_over_context_parallel_ranks_is_not_run_on_cuda_and_ends_nothing(
    bf16, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    # the oracle's optimizer asks it, and a CUDA build of torch would look for the GPU
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    started: list[str] = []

    def run(cases, *_):
        started.extend(case.case_id for case in cases)
        return {case.case_id: runner.Status("not started", 0.0) for case in cases}

    monkeypatch.setattr(runner, "run", run)
    verifier = Verifier(tmp_path, bf16=bf16, max_world_size=2, report=lambda _: None)
    found = verifier.verify([TOPOLOGIES[name] for name in ("tp2", "cp2", "cp4")], [])
    tp2, cp2, cp4 = found.topologies
    assert (tp2.status, cp4.reason) == ("failed", "needs 4 ranks, 2 can run here")
    assert ("cp2" in started) == bf16
    if not bf16:
        assert cp2.status == "not run" and cp2.ok and "--bf16 runs it" in cp2.reason


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=lambda t: t.name)
def test_every_layer_with_experts_has_its_place(topology):
    variant = VARIANTS[topology.variant]
    hf = SimpleNamespace(
        num_hidden_layers=variant.num_layers, moe_layer_numbers=variant.moe_layer_numbers
    )
    model = ModelSection(hf_checkpoint=".", **topology.model)
    assert not model.transformer_overrides, "a setting with a flag of its own is set by it"
    assert set(topology.recomputed_layers(hf)) <= set(variant.moe_layer_numbers)

"""The probe's limits: models that one device cannot hold, routers it does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from r3train.config.hf_facts import read_hf_facts
from r3train.doctor import probe
from r3train.doctor.finding import PROBLEM, WARNING
from r3train.doctor.model import Weights, read_weights
from tests.unit.doctor_setups import config_of

GIB = 1 << 30
# Qwen3-30B-A3B
LARGE = Weights(1_540_000_000, 28_990_000_000, 61_060_000_000, 16)


def test_a_model_of_30_billion_does_not_fit_one_gpu_and_says_by_how_much(tiny):
    config = config_of(tiny, bf16=True, expert_model_parallel_size=8)
    found = probe.no_room(config, LARGE, 141 * GIB, 2000 * GIB)
    assert found is not None and found.level == PROBLEM and "smaller" in found.remedy
    # 30.53e9 parameters of 2 + 4 + 12 bytes and a process, whatever the topology of the run
    assert "not run: one GPU: 141.0 GiB available, about 512.3 GiB needed" in found.text


@pytest.mark.parametrize(
    "gpu_gib, host_gib, fits", [(600, 60, True), (600, 50, False), (0, 560, False), (0, 580, True)]
)
def test_the_host_holds_hugging_faces_model_and_without_a_gpu_the_actor_too(
    gpu_gib, host_gib, fits, tiny
):
    config = config_of(tiny, bf16=True)
    found = probe.no_room(config, LARGE, gpu_gib * GIB, host_gib * GIB)
    assert (found is None) == fits


def test_nothing_is_built_for_a_model_without_room(tiny, monkeypatch):
    def built(*arguments):
        raise AssertionError("built")

    monkeypatch.setattr(probe, "_reference", built)
    (found,) = probe.probe_engines(config_of(tiny), 1 << 20)
    assert found.level == PROBLEM and found.text.startswith("not run: ")
    weights = read_weights(read_hf_facts(tiny / "model"))
    assert probe.no_room(config_of(tiny), weights, 80 * GIB, 8 * GIB) is None


@pytest.mark.parametrize("model_type, judged", [("qwen3_moe", True), ("glm4_moe", False)])
def test_routes_of_a_router_that_the_reference_does_not_know_are_said_not_to_be_judged(
    model_type, judged, tiny
):
    hf = replace(read_hf_facts(tiny / "model"), model_type=model_type)
    found = list(probe.judged_layers(hf))
    assert [f.level for f in found] == ([] if judged else [WARNING])
    assert judged or "routes are not judged: glm4_moe" in found[0].text

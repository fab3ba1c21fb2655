"""The probe's limits: models that one device cannot hold, and routers of every family."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from r3train.config.hf_facts import read_hf_facts
from r3train.doctor import probe
from r3train.doctor.finding import OK, PROBLEM
from r3train.doctor.judgement import FLOAT32, judge_routes, shortfall
from r3train.doctor.reference import _scores, load_reference
from r3train.families import TINY_NAMES
from r3train.families.published import PUBLISHED
from r3train.families.tiny_options import TinyOptions
from r3train.launch.estimate import Model
from r3train.verify.tiny import build
from tests.hf_reference import HfReference
from tests.unit.doctor_setups import config_of

GIB = 1 << 30
LARGE = Model(read_hf_facts(PUBLISHED / "Qwen3-30B-A3B"))


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


@pytest.mark.parametrize("mode, exact", [("drain", False), ("in_place", True)])
def test_the_probes_server_overlaps_as_those_of_the_run_do(mode, exact, tiny, monkeypatch):
    given = []

    def server(*_places, **options):
        given.append(options)
        raise InterruptedError

    monkeypatch.setattr("r3train.engine.server.SGLangServer", server)
    texts = (np.zeros(64, np.int32), np.zeros(64, np.int32))
    config = config_of(tiny, pause_generation_mode=mode)
    with pytest.raises(InterruptedError):
        probe._draw_situations(config, read_hf_facts(tiny / "model"), texts, 128)
    assert given[0]["exact_boundaries"] is exact and given[0]["return_routed_experts"]


def test_nothing_is_built_for_a_model_without_room(tiny, monkeypatch):
    def built(*arguments):
        raise AssertionError("built")

    monkeypatch.setattr(probe, "load_reference", built)
    (found,) = probe.probe_engines(config_of(tiny), 1 << 20)
    assert found.level == PROBLEM and found.text.startswith("not run: ")
    model = Model(read_hf_facts(tiny / "model"))
    assert probe.no_room(config_of(tiny), model, 80 * GIB, 8 * GIB) is None


FAMILIES = [name for name in TINY_NAMES if name != "kimi_k2"]  # deepseek_v3 with one group


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_tells_the_routes_of_a_family_from_those_of_other_tokens(family, tmp_path):
    build(tmp_path / "tiny", TinyOptions(family=family, num_experts=16, topk=4))
    directory = tmp_path / "tiny/model"
    hf, ids = read_hf_facts(directory), np.random.default_rng(1).integers(0, 64, 80)
    expected = load_reference(directory, bf16=False)(ids.astype(np.int32))
    log_probs, chosen = HfReference(directory).answer(ids)
    np.testing.assert_allclose(expected.log_probs, log_probs, atol=1e-6)
    assert [layer_id + 1 for layer_id in chosen] == list(hf.moe_layer_numbers)
    experts = np.stack(list(chosen.values()), axis=1)  # [T-1, L_moe, K]
    assert (shortfall(experts, expected.router_scores) == 0).all()
    parts = {"rows": np.arange(len(experts))}

    def judged(got):
        return judge_routes(got, expected.router_scores, FLOAT32, "x", parts).level

    assert judged(experts) == OK
    assert judged(np.roll(experts, 1, axis=0)) == PROBLEM
    other = experts.copy()
    other[40, -1, 0] = next(e for e in range(16) if e not in experts[40, -1])
    assert judged(other) == PROBLEM


def test_an_expert_of_a_group_that_ties_with_a_chosen_one_is_near_a_tie():
    """Groups of 2 experts, 1 of 2 groups chosen: 0.9 + 0.2 and 0.6 + 0.5 - 1e-4 as sigmoids."""
    bias = torch.tensor([0.4, -0.3, 0.1, -1e-4])
    config = SimpleNamespace(n_group=2, topk_group=1)
    scores = _scores(torch.zeros(1, 4), bias, config, 1)[:, None].numpy()  # 0.9, 0.2, 0.6, 0.5
    gaps = [float(shortfall(np.full((1, 1, 1), e), scores)[0, 0]) for e in range(4)]
    assert gaps[0] == 0 and min(gaps[1:]) > 1
    even = torch.tensor([0.1, -0.3, 0.1 - 1e-4, -0.3])  # 0.6 + 0.2 next to 0.5999 + 0.2
    scores = _scores(torch.zeros(1, 4), even, config, 1)[:, None].numpy()
    gaps = [float(shortfall(np.full((1, 1, 1), e), scores)[0, 0]) for e in range(4)]
    assert gaps[0] == 0 < gaps[2] < 2e-3 and gaps[1] > 1

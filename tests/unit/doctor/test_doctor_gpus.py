"""The doctor on a node of GPUs: whose rank and whose server is where, and what a GPU must hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.config.hf_facts import read_hf_facts
from r3train.doctor import command, gpus
from r3train.doctor.command import diagnose
from r3train.doctor.estimates import Estimate, estimate
from r3train.doctor.finding import OK, PROBLEM, WARNING, Finding
from r3train.doctor.model import read_weights
from r3train.tiny import TinyOptions, build
from tests.unit.doctor_setups import config_of

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, TinyOptions(), force=True)
    return directory


@pytest.fixture
def node_of_8_gpus(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(command, "_gpus", lambda: (8, 80 * GIB))


def of(findings, subject: str) -> list[Finding]:
    return [f for f in findings if f.subject == subject]


def test_ranks_of_other_nodes_are_not_this_nodes(node_of_8_gpus):
    """96 ranks on nodes of 8 GPUs are a good set-up."""
    findings = list(diagnose(None, 96))
    assert not [f for f in of(findings, "devices") if f.level == PROBLEM]
    assert "8 of 96 ranks on this node" in of(findings, "devices")[0].text
    (shm,) = of(findings, "shared memory")
    assert "about 1.0 GiB needed" in shm.text


def test_more_ranks_on_a_node_than_it_has_gpus_are_a_problem_still(node_of_8_gpus):
    findings = of(diagnose(None, 32, nproc_per_node=16), "devices")
    assert [f.level for f in findings][1:] == [PROBLEM]
    assert "16 ranks on this node and 8 GPU(s)" in findings[1].text


@pytest.mark.parametrize(
    "arguments, environment, here",
    [
        (["--world-size", "96"], {}, "8 of 96"),
        (["--world-size", "4"], {}, "4 of 4"),
        (["--world-size", "96", "--nproc-per-node", "6"], {}, "6 of 96"),
        (["--world-size", "96"], {"LOCAL_WORLD_SIZE": "4"}, "4 of 96"),
        ([], {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, "4 of 16"),
        ([], {}, "1 of 1"),
    ],
)
def test_how_many_ranks_are_here_is_told_or_known(arguments, environment, here, node_of_8_gpus):
    result = CliRunner().invoke(main, ["doctor", *arguments], env=environment)
    assert f"{here} ranks on this node" in result.output, result.output


@pytest.mark.parametrize(
    "arguments, environment",
    [
        (["--world-size", "4", "--nproc-per-node", "8"], {}),
        (["--world-size", "2"], {"LOCAL_WORLD_SIZE": "8"}),
        ([], {"WORLD_SIZE": "many"}),
        (["--nproc-per-node", "0"], {}),
    ],
)
def test_counts_that_cannot_be_are_wrong_usage(arguments, environment, node_of_8_gpus):
    result = CliRunner().invoke(main, ["doctor", *arguments], env=environment)
    assert result.exit_code == 2 and not isinstance(result.exception, ValueError), result.output


def test_on_cpus_all_ranks_are_here_unless_told_otherwise(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "_gpus", lambda: (0, 0))
    result = CliRunner().invoke(main, ["doctor", "--world-size", "4"])
    assert "4 of 4 ranks on this node" in result.output
    result = CliRunner().invoke(main, ["doctor", "--world-size", "4", "--nproc-per-node", "2"])
    assert "2 of 4 ranks on this node" in result.output


@pytest.fixture
def estimated(tiny) -> Estimate:
    hf, weights = read_hf_facts(tiny / "model"), read_weights(tiny / "model")
    return estimate(config_of(tiny), hf, weights, 2)


@pytest.mark.parametrize("rank_gib, level", [(81, PROBLEM), (75, WARNING), (60, OK)])
def test_what_a_rank_must_hold_is_held_against_its_gpu(rank_gib, level, tiny, estimated):
    elsewhere = config_of(tiny, rollout_external_engine_addrs=["host:30000"])
    e = replace(estimated, rank_bytes=rank_gib * GIB)
    (found,) = gpus.check_gpu_memory(elsewhere, e, 80 * GIB, 8, 8)
    assert found.level == level and f"{rank_gib}.0 GiB" in found.text
    assert bool(found.remedy) == (level != OK)


def test_the_kl_reference_is_on_the_host(tiny, node_of_8_gpus):
    hf, weights = read_hf_facts(tiny / "model"), read_weights(tiny / "model")
    without, with_it = (
        estimate(config_of(tiny, bf16=True, kl_loss_coef=coef), hf, weights, 2)
        for coef in (0.0, 0.1)
    )
    assert with_it.rank_bytes == without.rank_bytes and without.reference_bytes == 0
    assert with_it.reference_bytes == 2 * 2 * (weights.dense + weights.expert / 2)


def test_a_server_on_a_ranks_gpu_takes_its_share_of_it(tiny, estimated):
    e = replace(estimated, rank_bytes=40 * GIB)

    def found(nproc_per_node: int = 8, **sglang) -> Finding:
        config = config_of(tiny, update_weight_transfer_mode="disk")
        rollout = config.rollout.model_copy(update={"sglang": {"base_gpu_id": 0, **sglang}})
        config = config.model_copy(update={"rollout": rollout})
        (only,) = gpus.check_gpu_memory(config, e, 80 * GIB, 8, nproc_per_node)
        return only

    half = found(mem_fraction_static=0.55)
    assert half.level == PROBLEM and "44.0 GiB of SGLang" in half.text
    assert found(mem_fraction_static=0.3).level == OK
    assert found(mem_fraction_static=0.45).level == WARNING
    assert found().level == PROBLEM  # what SGLang takes untold
    assert found(nproc_per_node=7, base_gpu_id=7, mem_fraction_static=0.9).level == OK


def test_a_model_that_no_gpu_can_hold_is_a_problem_of_the_whole_command(
    tiny, node_of_8_gpus, monkeypatch
):
    monkeypatch.setattr(command, "_gpus", lambda: (8, 1 << 20))
    (found,) = of(diagnose(config_of(tiny), 2), "GPU memory")
    assert found.level == PROBLEM


def test_a_node_with_as_many_ranks_as_gpus_has_none_for_a_server_of_its_own(tiny, node_of_8_gpus):
    (found,) = of(diagnose(config_of(tiny), 8), "servers")
    assert found.level == PROBLEM and found.remedy
    assert "GPU 8" in found.text and "--nproc-per-node" in found.text
    (found,) = of(diagnose(config_of(tiny), 8, nproc_per_node=4), "servers")
    assert found.level == OK and "GPU 4" in found.text


def test_a_server_that_is_put_on_rank_0s_gpu_is_a_problem(tiny, node_of_8_gpus):
    on_rank_0 = config_of(tiny, sglang={"base_gpu_id": 0})
    (found,) = of(diagnose(on_rank_0, 2), "servers")
    assert found.level == PROBLEM and "NCCL refuses" in found.text


def test_sharing_is_a_warning_where_weights_do_not_go_through_nccl(tiny):
    by_disk = config_of(tiny, update_weight_transfer_mode="disk", sglang={"base_gpu_id": 0})
    (found,) = gpus.check_placement(by_disk, 1, 1)
    assert found.level == WARNING and "--sglang-mem-fraction-static" in found.remedy


def test_servers_with_gpus_of_their_own_or_elsewhere_are_fine(tiny):
    own = config_of(tiny, sglang={"base_gpu_id": 4, "tp_size": 2}, rollout_num_engines=2)
    assert [f.level for f in gpus.check_placement(own, 8, 4)] == [OK]
    elsewhere = config_of(tiny, rollout_external_engine_addrs=["host:30000"])
    assert not list(gpus.check_placement(elsewhere, 8, 8))
    assert not list(gpus.check_placement(config_of(tiny), 0, 2))


def test_a_server_flag_that_is_no_number_is_found(tiny):
    (found,) = gpus.check_placement(config_of(tiny, sglang={"tp_size": "two"}), 8, 4)
    assert found.level == PROBLEM and "tp_size" in found.text and "two" in found.text

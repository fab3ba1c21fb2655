"""Estimates, and the doctor on a node of GPUs: each rank's and server's place, and its memory."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from r3train.cli import main
from r3train.config.hf_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.doctor import doctor_command, memory
from r3train.doctor.machine import Node
from r3train.doctor.finding import FACT, OK, PROBLEM, WARNING, Finding
from r3train.doctor.memory import estimate
from r3train.doctor.model_checks import checkpoint_bytes, read_weights
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from tests.unit.doctor_setups import config_of, diagnose
from tests.unit.hf_model import facts

GIB = 1 << 30


@pytest.fixture
def node_of_8_gpus(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor_command, "gpus_here", lambda: (8, 80 * GIB))


def of(findings, subject: str) -> list[Finding]:
    return [f for f in findings if f.subject == subject]


def test_ranks_of_other_nodes_are_not_this_nodes(node_of_8_gpus):
    """96 ranks on nodes of 8 GPUs are a good set-up."""
    findings = list(diagnose(None, 96))
    assert not [f for f in of(findings, "devices") if f.level == PROBLEM]
    assert "8 of 96 ranks on this node" in of(findings, "devices")[0].text
    (shm,) = of(findings, "shared memory")
    assert "the ranks need about 1.0 GiB" in shm.text


def test_more_ranks_on_a_node_than_it_has_gpus_are_a_problem(node_of_8_gpus):
    findings = of(diagnose(None, 32, nproc_per_node=16), "devices")
    assert [f.level for f in findings][1:] == [PROBLEM]
    assert "16 ranks on this node and 8 GPU(s)" in findings[1].text


@pytest.mark.parametrize(
    "arguments, environment, here",
    [
        (["--world-size", "96"], {}, "8 of 96"),
        (["--world-size", "96", "--nproc-per-node", "6"], {}, "6 of 96"),
        (["--world-size", "96"], {"LOCAL_WORLD_SIZE": "4"}, "4 of 96"),
        ([], {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, "4 of 16"),
        ([], {}, "1 of 1"),
    ],
)
def test_ranks_of_this_node_are_given_or_known(arguments, environment, here, node_of_8_gpus):
    result = CliRunner().invoke(main, ["doctor", *arguments], env=environment)
    assert f"{here} ranks on this node" in result.output, result.output


def test_on_cpus_all_ranks_are_here(monkeypatch):
    monkeypatch.setattr(doctor_command, "gpus_here", lambda: (0, 0))
    result = CliRunner().invoke(main, ["doctor", "--world-size", "4"], env={"LOCAL_WORLD_SIZE": ""})
    assert "4 of 4 ranks on this node" in result.output


def test_estimates_follow_the_shapes(tiny):
    config = config_of(tiny, rollout_max_context_len=101, rollout_max_prompt_len=60)
    hf = read_hf_facts(tiny / "model")
    weights = read_weights(hf)
    assert weights.expert == 4 * 8 * 3 * 64 * 32
    # 2 ranks, experts over both: weight, gradient and, over 2 data ranks for dense, two moments
    e = estimate(config, weights, 2)
    assert e.rank == weights.dense * (8 + 8 / 2) + weights.expert / 2 * (8 + 8)
    # 4 layers of top 2 in a byte each, 67 rows of 68 tokens, 128 samples
    text = memory.route_estimate(config, hf).text
    assert "8 B per token; a sample of 68 tokens 536 B" in text and "at most 67.0 KiB" in text


def test_the_evidence_of_a_cluster_run_is_told_before_it_is_written(tiny):
    """64 ranks, 48 layers, 16 microbatches, 2,000 steps; one pass, each sample a microbatch."""
    given = dict(
        enable_r3_correctness_check=True,
        num_rollout=2000,
        rollout_batch_size=128,
        n_samples_per_prompt=8,
        max_tokens_per_gpu=512,
        rollout_max_response_len=500,
    )
    hf = facts(num_hidden_layers=48, moe_layer_numbers=tuple(range(1, 49)))
    calls, summed = (config_of(tiny, r3_evidence=e, **given) for e in ("calls", "summed"))
    of_calls, of_sums = (memory.check_evidence_room(c, hf, 64, 1e12) for c in (calls, summed))
    assert of_sums.text == "about 1021.8 MiB of 2,000 steps on 64 ranks, summed"
    assert "at most 34.6 GiB of 2,000 steps" in of_calls.text
    assert of_calls.text.endswith("; 1021.8 MiB with --r3-evidence summed")
    (warned, fits) = (memory.check_evidence_room(c, hf, 64, 2e9) for c in (calls, summed))
    assert (warned.level, warned.remedy) == (WARNING, "--r3-evidence summed")
    assert fits.level == FACT
    assert any(f.subject == "evidence estimate" for f in diagnose(calls, 2))
    tenth = memory.check_evidence_room(
        config_of(tiny, r3_check_interval=10, r3_evidence="summed", **given), hf, 64, 1e12
    )
    assert "of 209 steps on 64 ranks" in tenth.text  # 10 at first, and 199 after them


PRECISION_AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    "overrides, gradient, state, on_host",
    [
        ({}, 4, 12, 0),
        (PRECISION_AWARE, 4, 10, 0),
        (PRECISION_AWARE | {"store_param_remainders": False}, 4, 12, 0),
        (PRECISION_AWARE | {"main_grads_dtype": "bf16", "exp_avg_dtype": "fp8"}, 2, 7, 0),
        (
            PRECISION_AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
            4,
            0,
            16,
        ),
    ],
)
def test_the_estimate_follows_the_optimizers_overrides(overrides, gradient, state, on_host, tiny):
    weights = read_weights(read_hf_facts(tiny / "model"))
    e = estimate(config_of(tiny, bf16=True, optimizer_overrides=overrides), weights, 2)
    held = weights.dense * (2 + gradient + state / 2) + weights.expert / 2 * (2 + gradient + state)
    assert e.rank == held
    assert e.offloaded == on_host * (weights.dense / 2 + weights.expert / 2)


def test_logits_are_counted_by_chunks(tiny):
    settings = dict(bf16=True, max_tokens_per_gpu=20480, tensor_model_parallel_size=4)
    chunked = memory.logits_bytes(config_of(tiny, **settings), 151936)
    # counted by tests/rehearsal/loss_memory.py
    assert chunked == pytest.approx(2179576844, rel=1e-3)
    whole = memory.logits_bytes(config_of(tiny, log_probs_chunk_size=-1, **settings), 151936)
    assert whole == pytest.approx(20480 * 151936 / 4 * 18)


def test_the_kl_reference_is_on_the_host(tiny):
    weights = read_weights(read_hf_facts(tiny / "model"))
    without, with_it = (
        estimate(config_of(tiny, bf16=True, kl_loss_coef=coef), weights, 2) for coef in (0.0, 0.1)
    )
    assert with_it.rank == without.rank and without.reference == 0
    assert with_it.reference == 2 * 2 * (weights.dense + weights.expert / 2)


def test_lora_trains_the_adapters_and_keeps_the_weights_alone(tiny):
    """Rank 8 on 4 layers of 8 experts, hidden 64, expert width 32; two ranks share the experts."""
    config = config_of(tiny, lora_rank=8, kl_loss_coef=0.1)
    weights = read_weights(read_hf_facts(tiny / "model"), config.lora)
    assert weights.adapter_expert == 4 * 8 * 3 * 8 * (64 + 32)
    e = estimate(config, weights, 2)
    adapters = weights.adapter_dense * (8 + 8 / 2) + weights.adapter_expert / 2 * (8 + 8)
    assert e.rank == (weights.dense + weights.expert / 2) * 4 + adapters
    assert e.checkpoint == (weights.adapter_dense + weights.adapter_expert) * (4 + 8)
    assert e.reference == 0  # the adapters switched off


def test_adapters_of_experts_that_are_one_tensor_a_layer_are_counted_one_an_expert(tmp_path):
    build(tmp_path, TinyOptions(family="gpt_oss"))
    weights = read_weights(read_hf_facts(tmp_path / "model"), LoraSection(lora_rank=8))
    assert weights.adapter_expert == 4 * 8 * 8 * ((64 + 2 * 32) + (32 + 64))


@pytest.mark.parametrize("prefix", ["model.layers.4.", "mtp.layers.0."])
def test_layers_of_multi_token_prediction_are_neither_held_nor_adapted(prefix, tiny, tmp_path):
    """Published checkpoints have them after the model's own layers, or apart from these."""
    hf, lora = read_hf_facts(tiny / "model"), config_of(tiny, lora_rank=8).lora
    own = read_weights(hf, lora)
    directory = tmp_path / "model"
    shutil.copytree(hf.path, directory)
    names = ("self_attn.q_proj", "mlp.experts.0.gate_proj", "eh_proj")
    extra = {f"{prefix}{name}.weight": np.zeros((64, 64), np.float32) for name in names}
    save_file(extra, directory / "more.safetensors")
    found = read_hf_facts(directory)
    more = (directory / "more.safetensors").stat().st_size
    assert read_weights(found, lora) == own
    assert checkpoint_bytes(found) == checkpoint_bytes(hf) + more


def rank_of(gib: float) -> memory.StageRanks:
    """A rank that holds so much, and nothing of a microbatch."""
    held = memory.Estimate(gib * GIB, 0, 0, reference=0, offloaded=0, checkpoint=0)
    return memory.StageRanks(range(8), (1,), held, activations=0, layer=0, logits=0, update=0)


@pytest.mark.parametrize("rank_gib, level", [(81, PROBLEM), (75, WARNING), (60, OK)])
def test_a_ranks_bytes_are_compared_with_its_gpu(rank_gib, level, tiny):
    elsewhere = config_of(tiny, rollout_external_engine_addrs=["host:30000"])
    (found,) = memory.check_gpus(elsewhere, Node(8, 80 * GIB, 8, 8), rank_of(rank_gib))
    assert found.level == level and f"{rank_gib}.0 GiB" in found.text
    assert bool(found.remedy) == (level != OK)


@pytest.mark.parametrize(
    "flags, ranks, level",
    [
        ({"mem_fraction_static": 0.55}, 8, PROBLEM),
        ({"mem_fraction_static": 0.45}, 8, WARNING),
        ({"mem_fraction_static": 0.3}, 8, OK),
        ({}, 8, PROBLEM),  # SGLang's own choice
        ({"base_gpu_id": 7, "mem_fraction_static": 0.9}, 7, OK),
    ],
)
def test_a_server_on_a_ranks_gpu_takes_its_share_of_it(flags, ranks, level, tiny):
    config = config_of(tiny, update_weight_transfer_mode="disk")
    rollout = config.rollout.model_copy(update={"sglang": {"base_gpu_id": 0, **flags}})
    config = config.model_copy(update={"rollout": rollout})
    _, found = memory.check_gpus(config, Node(8, 80 * GIB, ranks, ranks), rank_of(40))
    assert found.level == level and ("of SGLang" in found.text) == (ranks == 8)


def test_a_model_that_no_gpu_can_hold_is_a_problem_of_the_whole_command(
    tiny, node_of_8_gpus, monkeypatch
):
    monkeypatch.setattr(doctor_command, "gpus_here", lambda: (8, 1 << 20))
    (found,) = of(diagnose(config_of(tiny), 2), "GPU memory")
    assert found.level == PROBLEM


DISK = {"update_weight_transfer_mode": "disk"}


@pytest.mark.parametrize(
    "fields, num_gpus, ranks, level, text",
    [
        ({}, 8, 8, PROBLEM, "GPU 8"),
        ({}, 8, 4, OK, "GPU 4"),
        ({"sglang": {"base_gpu_id": 0}}, 8, 2, PROBLEM, "NCCL refuses"),
        ({"sglang": {"base_gpu_id": 0}, **DISK}, 1, 1, WARNING, "share GPU 0"),
        ({"sglang": {"base_gpu_id": 4, "tp_size": 2}, "rollout_num_engines": 2}, 8, 4, OK, "7"),
        ({"sglang": {"tp_size": "two"}}, 8, 4, PROBLEM, "'two'"),
        ({"rollout_external_engine_addrs": ["host:30000"]}, 8, 8, None, ""),
        ({}, 0, 2, None, ""),
    ],
)
def test_servers_need_gpus_that_no_rank_has(fields, num_gpus, ranks, level, text, tiny):
    node = Node(num_gpus, 80 * GIB, ranks, ranks)
    found = list(memory.check_gpus(config_of(tiny, **fields), node, None))
    assert [f.level for f in found] == ([] if level is None else [level])
    assert all(text in f.text for f in found)

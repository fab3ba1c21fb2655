"""The doctor on a node of GPUs: each rank's and server's place, and its memory."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.families.read_facts import read_hf_facts
from r3train.doctor import diagnosis, memory
from r3train.doctor.machine import Node
from r3train.launch.job.finding import OK, PROBLEM, WARNING, Finding
from r3train.families.published import PUBLISHED
from r3train.launch.estimate.memory_use import (
    Held,
    host_bytes,
    Model,
    server_bytes,
    StageRanks,
    training_checkpoint_bytes,
    value_bytes,
)
from tests.unit.doctor_setups import config_of, diagnose

GIB = 1 << 30


@pytest.fixture
def node_of_8_gpus(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (8, 80 * GIB))


def of(findings, subject: str) -> list[Finding]:
    return [f for f in findings if f.subject == subject]


def test_ranks_of_other_nodes_are_not_this_nodes(node_of_8_gpus):
    """96 ranks on nodes of 8 GPUs are a good set-up."""
    findings = list(diagnose(None, 96))
    assert not [f for f in of(findings, "devices") if f.level == PROBLEM]
    assert "8 of 96 ranks on this node" in of(findings, "devices")[0].text
    (shm,) = of(findings, "shared memory")
    assert "the ranks need about 1,024 MiB" in shm.text


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
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (0, 0))
    result = CliRunner().invoke(main, ["doctor", "--world-size", "4"], env={"LOCAL_WORLD_SIZE": ""})
    assert "4 of 4 ranks on this node" in result.output


@pytest.mark.parametrize(
    "kind, free, level",
    [("calls", 1e12, OK), ("calls", 2e9, WARNING), ("summed", 2e9, OK), ("summed", 1e8, WARNING)],
)
def test_evidence_without_room_on_disk_is_known_before_it_is_written(kind, free, level, tiny):
    config = config_of(
        tiny,
        enable_r3_correctness_check=True,
        num_rollout=2000,
        rollout_batch_size=128,
        n_samples_per_prompt=8,
        r3_evidence=kind,
    )
    model = Model(read_hf_facts(PUBLISHED / "Qwen3-30B-A3B"))
    (found,) = memory.check_evidence(config, model, 64, free)
    assert found.level == level and "of 2,000 steps on 64 ranks" in found.text
    if level == WARNING:
        assert found.remedy == {"calls": "--r3-evidence summed", "summed": "free room there"}[kind]


# settings -> the finding that has the bytes, and these: of the logs, the weights, the servers' checkpoint, a checkpoint
SAVES = {"save": "saved"}
WRITTEN = {
    "logs": ({}, "run directory", (1, 0, 0, 0)),
    "weights as files": ({"update_weight_transfer_mode": "disk"}, "run directory", (1, 2, 0, 0)),
    "servers of fp8": ({"bf16": True, "rollout_weights": "fp8"}, "run directory", (1, 0, 1, 0)),
    # the new one is written before the oldest goes
    "one checkpoint": (SAVES | {"save_keep_last": 1}, "checkpoints", (0, 0, 0, 2)),
    "four checkpoints": (SAVES | {"save_keep_last": 4}, "checkpoints", (0, 0, 0, 5)),
    "all checkpoints": (SAVES, "checkpoints", (0, 0, 0, 3)),
}


@pytest.mark.parametrize("lack, level", [(0, OK), (1, PROBLEM)])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_disk_has_room_for_all_that_a_run_writes_there_at_once(
    written, lack, level, tiny, monkeypatch
):
    fields, subject, counts = WRITTEN[written]
    fields = {"update_weight_transfer_mode": "shared_memory", **fields}
    if "save" in fields:
        fields["save"] = str(tiny / fields["save"])
    config = config_of(tiny, **fields)
    model = Model(read_hf_facts(tiny / "model"), config.lora)
    each = (
        256 << 20,
        model.total.total * value_bytes(config),
        server_bytes(config, model),
        training_checkpoint_bytes(config, model),
    )
    needed = sum(count * size for count, size in zip(counts, each, strict=True))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - lack))
    assert [f.level for f in of(diagnose(config, 2), subject)] == [level]


def rank_of(gib: float) -> StageRanks:
    """A rank that holds so much, and nothing of a microbatch."""
    held = Held(gib * GIB, 0, 0, reference=0, offloaded=0)
    return StageRanks(range(8), held, passes=0, update=0)


def test_the_host_of_a_colocated_run_has_room_for_what_ranks_put_there(tiny):
    model = Model(read_hf_facts(tiny / "model"), config_of(tiny).lora)
    held = Held(weights=3 * GIB, gradients=5 * GIB, optimizer=4 * GIB, reference=0, offloaded=0)
    ranks = StageRanks(range(8), held, passes=0, update=0)
    nccl = config_of(tiny, colocate=True, distributed_backend="nccl")
    for on_gpus in (True, False):  # a recipe of GPUs is judged by them where there are none
        host = host_bytes(nccl, model, ranks, 8, 8, on_gpus)
        assert host["what ranks hold, while servers generate"] == 8 * 7 * GIB
    for apart in (config_of(tiny, distributed_backend="nccl"), config_of(tiny, colocate=True)):
        host = host_bytes(apart, model, ranks, 8, 8, on_gpus=False)
        assert "what ranks hold, while servers generate" not in host


def test_a_node_holds_its_ranks_part_of_a_checkpoint_that_is_written_while_training_goes_on(tiny):
    model = Model(read_hf_facts(tiny / "model"), config_of(tiny).lora)
    kept = [
        sum(host_bytes(config, model, rank_of(1), 16, 4, on_gpus=True).values())
        for config in (
            config_of(tiny, save=str(tiny / "saved"), async_save=on) for on in (True, False)
        )
    ]
    assert kept[0] - kept[1] == training_checkpoint_bytes(config_of(tiny), model) / 4


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
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (8, 1 << 20))
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

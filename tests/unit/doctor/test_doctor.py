"""The doctor: ten planted problems and more are found with a remedy; a good set-up is quiet."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.config.hf_facts import read_hf_facts
from r3train.doctor import command, machine, versions
from r3train.doctor.command import diagnose
from r3train.doctor.estimates import describe, estimate
from r3train.doctor.finding import FACT, OK, PROBLEM, WARNING
from r3train.doctor.model import read_weights
from r3train.tiny import TinyOptions, build
from tests.unit.doctor_setups import ROOT, config_of, problems


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    build(directory, TinyOptions(), force=True)
    return directory


@pytest.fixture
def tiny(good, tmp_path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(good, tmp_path / "tiny"))


@pytest.fixture
def quiet_machine(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "_gpus", lambda: (0, 0))


def test_a_good_set_up_is_quiet_and_ends_with_0(good, tmp_path, quiet_machine):
    levels = {f.level for f in diagnose(config_of(good, run_dir=str(tmp_path)), 2)}
    assert levels == {OK, FACT}
    args = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--world-size", "2"]
    args += ["--hf-checkpoint", str(good / "model"), "--prompt-data", str(good / "prompts.jsonl")]
    args += ["--use-rollout-routing-replay", "--run-dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(main, ["doctor", *args])
    assert result.exit_code == 0, result.output
    assert "qwen3_moe" in result.output and json.loads(result.output)


def test_without_a_configuration_the_machine_alone_is_looked_at(quiet_machine):
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0 and "versions" in result.output
    assert CliRunner().invoke(main, ["doctor", "--probe"]).exit_code == 2


def test_a_dense_model_with_r3(tmp_path, quiet_machine):
    build(tmp_path / "dense", TinyOptions(num_experts=0))
    assert "needs a mixture-of-experts model" in problems(config_of(tmp_path / "dense"))


def test_a_missing_checkpoint(tiny, quiet_machine):
    assert "no such checkpoint directory" in problems(config_of(tiny, hf_checkpoint="/nowhere"))


def test_a_cut_weight_file(tiny, quiet_machine):
    file = tiny / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in problems(config_of(tiny)) and "cut?" in problems(config_of(tiny))
    file.write_bytes(b"\0")
    assert "cut within its header" in problems(config_of(tiny))


def test_a_missing_weight_shard(tiny, quiet_machine):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tiny / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in problems(config_of(tiny))


@pytest.mark.parametrize("damage", ["gone", "garbage", "too many tokens"])
def test_a_bad_tokenizer(damage, tiny, quiet_machine):
    model = tiny / "model"
    if damage == "gone":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).unlink()
    elif damage == "garbage":
        (model / "tokenizer.json").write_text("{")
    else:
        content = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**content, "vocab_size": 32}))
    assert "tokenizer: " in problems(config_of(tiny))


def test_a_bad_prompt_and_an_unknown_reward(tiny, quiet_machine):
    (tiny / "prompts.jsonl").write_text('{"input": "cat", "label": ["dog"]}\n{\n')
    found = problems(config_of(tiny, rm_type="nothing"))
    assert "prompts: " in found and "line 2" in found and "reward: " in found


def test_a_topology_that_does_not_fit(tiny, quiet_machine):
    assert "does not divide" in problems(config_of(tiny), world_size=3)


def test_a_server_flag_that_sglang_does_not_have(tiny, quiet_machine):
    found = problems(config_of(tiny, sglang={"foo": 3, "chunked_prefil_size": 3}))
    assert "--sglang-foo: the installed SGLang has no such server flag" in found
    assert "no such server flag" not in problems(config_of(tiny, sglang={"tp_size": 1}))


def test_what_the_training_command_refuses_is_a_problem_whatever_it_is(tiny, quiet_machine):
    (tiny / "hf").mkdir()
    (tiny / "hf" / "notes.txt").write_text("not ours")
    found = problems(config_of(tiny, save_hf=str(tiny / "hf")))
    assert "train_async.py refuses it: " in found and str(tiny / "hf") in found


def test_a_port_that_is_taken(tiny, quiet_machine):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is taken" in problems(None, ports=(port,))
        assert "SGLang: port" in problems(config_of(tiny, sglang={"port": port}))
    assert f"port {port}" not in problems(None, ports=(port,))


def test_an_external_server_that_does_not_answer(tiny, quiet_machine):
    config = config_of(tiny, rollout_external_engine_addrs=["127.0.0.1:9"])
    assert "server 127.0.0.1:9: does not answer" in problems(config)


def test_no_room_on_disk_and_in_shared_memory(tmp_path):
    (found,) = machine.check_room("checkpoints", tmp_path / "a" / "b", 1 << 60)
    assert found.level == PROBLEM and "1.0 EiB" not in found.text and "needed" in found.text
    (found,) = machine.check_room("run directory", Path("/proc/nothing"), 1)
    assert found.level == PROBLEM and "cannot be written" in found.text
    (found,) = machine.check_shared_memory(8, free_bytes=64 << 20)
    assert found.level == PROBLEM and "--shm-size" in found.remedy


def test_too_little_memory():
    assert [f.level for f in machine.check_memory(1 << 30, 2 << 30)] == [PROBLEM]
    assert [f.level for f in machine.check_memory(3 << 30, 2 << 30)] == [WARNING]


def test_more_ranks_than_gpus_and_threads_that_fight(monkeypatch):
    levels = [f.level for f in machine.check_devices(2, 80 << 30, 4, 4, 16)]
    assert levels == [FACT, PROBLEM]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [f.level for f in machine.check_devices(0, 0, 2, 2, 2)] == [FACT, WARNING]


GOOD = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "sglang": "0.5.23",
    "transformers": "5.19.0",
    "mbridge": "0.15.1",
    "numpy": "2.4.6",
    "torchvision": "0.28.0",
}


@pytest.mark.parametrize(
    "changes, cuda, subject",
    [
        ({"sglang": "0.5.22"}, False, "sglang"),
        ({"megatron-core": None}, False, "megatron-core"),
        ({"transformers": "4.57.1"}, False, "transformers"),
        ({"torch": "2.12.1"}, False, "torch"),
        ({}, True, "torch"),
        ({"torchvision": "0.28.0+cpu"}, False, "torchvision"),
        ({"transformer-engine": "2.12.0"}, False, "transformer-engine"),
        ({"numpy": "1.26.4"}, False, "numpy"),
    ],
)
def test_version_conflicts(changes, cuda, subject):
    have = {**GOOD, **changes}
    found = list(versions.check_versions(have.get, (3, 11), cuda))
    assert [(f.level, f.subject) for f in found] == [(PROBLEM, subject)]
    assert [f.level for f in versions.check_versions(GOOD.get, (3, 11))] == [OK]
    assert [f.level for f in versions.check_versions(GOOD.get, (3, 13))] == [PROBLEM]


def test_estimates_follow_the_shapes(good):
    config = config_of(good, rollout_max_context_len=101, rollout_max_prompt_len=60)
    hf, weights = read_hf_facts(good / "model"), read_weights(good / "model")
    assert weights.expert == 4 * 8 * 3 * 64 * 32
    e = estimate(config, hf, weights, 2)
    assert e.route_row_bytes == 4 * 2 and e.sample_tokens == 68
    assert e.sample_bytes == 67 * 8 and e.step_bytes == 67 * 8 * 128
    # 2 ranks, experts over both: weight, gradient and, over 2 data ranks for dense, two moments
    assert e.rank_bytes == weights.dense * (8 + 8 / 2) + weights.expert / 2 * (8 + 8)
    assert {f.subject for f in describe(e, config)} == {"memory estimate", "route estimate"}

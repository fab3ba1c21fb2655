"""The doctor: each planted fault is found, with a remedy; a good set-up is quiet."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web
from click.testing import CliRunner

from r3train.cli import main
from r3train.doctor import diagnosis, machine
from r3train.launch.job.finding import FACT, OK, PROBLEM, WARNING, Finding, room
from r3train.launch.job.limits import check_shared_memory
from r3train.launch.job.preflight import By, preflight, PreflightError
from tests.unit.config.test_config import config
from tests.unit.doctor_setups import ROOT, config_of, diagnose, worries
from tests.fakes.server import Fake


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (0, 0))


def test_a_good_set_up_is_quiet_and_ends_with_0(tiny, tmp_path):
    levels = {f.level for f in diagnose(config_of(tiny, run_dir=str(tmp_path)), 2)}
    assert levels == {OK, FACT}
    args = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--world-size", "2"]
    args += ["--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")]
    args += ["--use-rollout-routing-replay", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(main, ["doctor", *args, "--json"])
    assert result.exit_code == 0, result.output
    assert "qwen3_moe" in result.output and json.loads(result.output)
    assert CliRunner().invoke(main, ["doctor", *args, "--hf-checkpoint", "/no"]).exit_code == 1


def test_a_reward_of_the_working_directory_is_found_as_a_run_finds_it(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rewards_here.py").write_text("def half(prompt, text, ids):\n    return 0.5\n")
    args = ["--config", "tiny_cpu", "--world-size", "2", "--hf-checkpoint", str(tiny / "model")]
    args += ["--prompt-data", str(tiny / "prompts.jsonl"), "--json"]
    found = CliRunner().invoke(main, ["doctor", *args, "--custom-rm-path", "rewards_here:half"])
    assert "cannot import" not in found.output
    found = CliRunner().invoke(main, ["doctor", *args, "--custom-rm-path", "rewards_there:half"])
    assert "cannot import rewards_there" in found.output


def test_without_a_configuration_the_machine_alone_is_looked_at():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0 and "versions: " in result.output


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def directory_as_shard(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()


def without_tokenizer(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()


def small_vocabulary(model: Path) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "vocab_size": 32}))


def without_eos(model: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, "eos_token_id": None}))


def bad_prompt(model: Path) -> None:
    prompts = '{"input": "cat", "label": ["dog"]}\n{\n'
    (model.parent / "prompts.jsonl").write_text(prompts)


def numbers_as_labels(model: Path) -> None:
    (model.parent / "prompts.jsonl").write_text('{"input": "cat", "label": 3}\n')


def server(addr: str) -> dict:
    return {"rollout_external_engine_addrs": [addr]}


CASES: dict[str, tuple[Callable[[Path], object] | dict, str, str, str]] = {
    # damage of the checkpoint or fields of the configuration; level, subject, text of the finding.  One or two of
    # each subject: what preflight finds has its tests in unit/launch
    "no checkpoint": ({"hf_checkpoint": "/no"}, PROBLEM, "checkpoint", "no such checkpoint"),
    "cut shard": (cut, PROBLEM, "checkpoint", "model.safetensors: not a whole"),
    "directory as shard": (directory_as_shard, PROBLEM, "checkpoint", "Is a directory"),
    "no eos": (without_eos, WARNING, "checkpoint", "no eos_token_id"),
    "no tokenizer": (without_tokenizer, PROBLEM, "tokenizer", "no tokenizer there"),
    "too many tokens": (small_vocabulary, PROBLEM, "tokenizer", "ids past them crash it"),
    "bad prompt": (bad_prompt, PROBLEM, "prompts", "jsonl:2"),
    "no R3": ({"use_rollout_routing_replay": False}, WARNING, "model", "experts without R3"),
    "full export directory": ({"save_hf": ROOT}, PROBLEM, "configuration", "--save-hf"),
    "port above 65535": ({"sglang": {"port": 99999}}, PROBLEM, "machine", "99999 is no"),
    "run directory in a file": (
        {"run_dir": str(ROOT / "README.md/run")},
        PROBLEM,
        "run directory",
        "cannot be written: Not a directory",
    ),
    "label of another kind": (numbers_as_labels, PROBLEM, "reward", "needs a label of words"),
    "silent server": (server("127.0.0.1:9"), PROBLEM, "server 127.0.0.1:9", "does not answer"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_the_configuration_or_checkpoint_is_found(name, tiny, tmp_path):
    fault, level, subject, text = CASES[name]
    own = Path(shutil.copytree(tiny, tmp_path / "tiny"))
    if callable(fault):
        fault(own / "model")
    fields = fault if isinstance(fault, dict) else {}
    found = [f for f in worries(config_of(own, **fields)) if f.subject == subject]
    assert any(f.level == level and text in f.text for f in found), found


def test_a_dense_model_with_r3_is_found(dense):
    found = worries(config_of(dense))
    assert any("needs a mixture-of-experts model" in f.text for f in found)


def test_kv_pools_that_are_smaller_than_the_requests_need_are_found(tiny):
    """The demo has 128 requests in flight, of up to 4 prompt tokens and 8 of the answer."""
    texts = {f.subject: f.text for f in diagnose(config_of(tiny), 2) if f.level == OK}
    assert texts["prompts"].endswith("the longest 4 tokens")
    assert "hold 8,192 tokens" in texts["KV pools"]
    needed = 128 * (4 + 8)

    def found(**fields):
        return [f for f in worries(config_of(tiny, **fields)) if f.subject == "KV pools"]

    def pools(tokens):
        return {"sglang": {"max_total_tokens": tokens, "mem_fraction_static": 0.3}}

    assert not found(**pools(needed))
    (finding,) = found(**pools(needed - 1))
    assert finding.level == WARNING and f"need {needed:,}" in finding.text
    assert not found(**pools(needed // 2), rollout_num_engines=2)
    assert not found(**pools(1), use_rollout_routing_replay=False)


async def test_the_kv_pools_of_external_servers_are_asked_for(tiny):
    info = json.loads((ROOT / "tests/contract/payloads/server_info.json").read_text())

    def found(addrs):
        config = config_of(tiny, rollout_external_engine_addrs=addrs)
        return [f for f in worries(config) if f.subject == "KV pools"]

    def of(tokens):
        async def answer(request, _body):
            told = info | {"max_total_num_tokens": tokens}
            return web.json_response(
                told if request.path == "/server_info" else {"weight_version": "0"}
            )

        return Fake(answer)

    async with of(1535).running() as small, of(1).running() as other:
        (finding,) = await asyncio.to_thread(found, [small])
        assert finding.level == WARNING and "hold 1,535 tokens" in finding.text
        assert not await asyncio.to_thread(found, [small, other]), "together they hold enough"


def test_a_topology_that_does_not_fit_is_found(tiny):
    assert any("is not a multiple" in f.text for f in worries(config_of(tiny), world_size=3))


def test_a_key_that_cannot_be_sent_is_found(tiny, monkeypatch):
    monkeypatch.setenv("R3TRAIN_ENGINE_API_KEY", "short")
    (found,) = worries(config_of(tiny))
    assert found.subject == "key of the servers" and "R3TRAIN_ENGINE_API_KEY" in found.text


def test_a_port_that_is_taken_is_found_until_it_is_free(tiny, monkeypatch):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert f"port {port} of 127.0.0.1 is taken" in {f.text for f in worries(None)}
        taken = [f for f in worries(config_of(tiny, sglang={"port": port})) if str(port) in f.text]
        assert {(f.subject, f.level) for f in taken} == {
            ("MASTER_PORT", PROBLEM),
            ("machine", PROBLEM),
        }
    assert not worries(None)


@pytest.mark.parametrize("port", ["99999", "-1", "0", "x", "\u00b2"])
def test_a_master_port_that_cannot_be_is_found(port, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", port)
    (found,) = worries(None)
    assert found.subject == "MASTER_PORT" and "1 to 65535" in found.text


@pytest.mark.parametrize(
    "arguments, environment",
    [
        (["--world-size", "4", "--nproc-per-node", "8"], {}),
        (["--world-size", "2"], {"LOCAL_WORLD_SIZE": "8"}),
        ([], {"WORLD_SIZE": "many"}),
        (["--nproc-per-node", "0"], {}),
    ],
)
def test_counts_that_cannot_be_are_wrong_usage(arguments, environment):
    result = CliRunner().invoke(main, ["doctor", *arguments], env=environment)
    assert result.exit_code == 2 and not isinstance(result.exception, ValueError), result.output


def test_disk_and_memory_are_problems_without_room_and_fine_with_it(tmp_path, monkeypatch):
    (found,) = machine.check_disk("checkpoints", tmp_path / "a" / "b", {"x": 1 << 60})
    assert found.level == PROBLEM and "about 1048576.0 TiB needed" in found.text
    (found,) = machine.check_disk("run directory", tmp_path / "a", {"x": 1})
    assert found.level == OK
    (found,) = check_shared_memory(1 << 40)
    assert found.level == WARNING and "--shm-size" in found.remedy
    host = partial(room, "memory", "the host", parts={"x": 2 << 30}, remedy="", margin=2 << 30)
    levels = [host(has=n << 30).level for n in (1, 3, 5)]
    assert levels == [PROBLEM, WARNING, OK]


def start_faults() -> list[str]:
    """The faults that end a start of settings without files before anything has started."""
    with pytest.raises(PreflightError) as error:
        preflight(config(), 1, By.JOB)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize("length, fits", [(82, True), (83, False)])
def test_a_directory_is_too_long_for_sockets_where_the_kernel_refuses_theirs(
    length, fits, monkeypatch
):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        directory = Path(short) / ("x" * (length - len(short) - 1))
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        found = [line for line in start_faults() if str(directory) in line]
        assert [("TMPDIR" in line, "82" in line) for line in found] == [(True, True)] * (not fits)
        # as the server's guard and SGLang name them
        name = tempfile.NamedTemporaryFile(dir=tempfile.mkdtemp(prefix="r3t-"), delete=False).name
        Path(name).unlink()
        with socket.socket(socket.AF_UNIX) as server:
            with nullcontext() if fits else pytest.raises(OSError):
                server.bind(name)


def test_threads_that_fight_over_cores_are_found(monkeypatch):
    node = machine.Node(0, 0, 2, 2)
    for threads, levels in (("1", [FACT]), ("2", [FACT, WARNING])):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert [f.level for f in machine.check_devices(node, 2)] == levels
    monkeypatch.delenv("OMP_NUM_THREADS")  # then ranks share the cores
    assert [f.level for f in machine.check_devices(node, 2)] == [FACT]


GOOD = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.19.2",
    "sglang": "0.5.23",
    "transformers": "5.19.0",
    "numpy": "2.4.6",
    "torchvision": "0.28.0",
}


@pytest.mark.parametrize(
    "changes, cuda, subject, level",
    [
        ({"sglang": "0.5.22"}, False, "sglang", PROBLEM),
        ({"megatron-core": None}, False, "megatron-core", PROBLEM),
        ({"transformers": "4.57.1"}, False, "transformers", PROBLEM),
        ({"torch": None}, False, "torch", PROBLEM),
        ({"torch": "2.12.1"}, False, "torch", PROBLEM),
        ({"torch": "2.13.0+cu130"}, False, "torch", WARNING),
        ({}, True, "torch", PROBLEM),
        ({"torchvision": "0.28.0+cpu"}, False, "torchvision", PROBLEM),
        ({"vllm": "0.12.0"}, False, "vllm", WARNING),
        ({"transformer-engine": "2.11.0"}, False, "transformer-engine", PROBLEM),
        ({"transformer-engine": "2.13.0"}, False, "transformer-engine", PROBLEM),
        ({"numpy": "1.26.4"}, False, "numpy", PROBLEM),
    ],
)
def test_version_conflicts_are_found(changes, cuda, subject, level):
    have = {**GOOD, **changes}
    found = list(machine.check_versions(have.get, (3, 12), cuda))
    assert [(f.level, f.subject) for f in found] == [(level, subject)] and found[0].remedy


@pytest.mark.parametrize(
    ("capabilities", "worried"),
    [
        ([(9, 0), (9, 0)], []),
        ([(10, 0)], []),
        ([(9, 0), (8, 0)], ["8.0"]),
        ([(12, 0)], ["12.0"]),
    ],
)
def test_a_gpu_without_fused_attention_of_packs_is_named(capabilities, worried, monkeypatch):
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (len(capabilities), 80 << 30))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.__getitem__)
    found = [f for f in diagnosis.diagnose(None, 1) if f.subject == "GPU"]
    assert [f.text.split(":")[0].split()[-1] for f in found] == worried
    assert all(f.level == WARNING and f.remedy for f in found)


def test_on_gpus_the_machine_alone_is_asked_for_transformer_engines_part_for_torch(monkeypatch):
    """The image's smoke test: that part is compiled, and may be there and not import."""
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (1, 80 * 10**9))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    def asked() -> list[Finding]:
        return [f for f in diagnosis.diagnose(None, 1) if f.subject == "Transformer Engine"]

    (found,) = asked()
    assert (
        found.level == PROBLEM and "transformer_engine.pytorch, which does not import" in found.text
    )
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert [f.level for f in asked()] == [OK]
    monkeypatch.setattr(diagnosis, "gpus_here", lambda: (0, 0))
    assert not asked()


def test_pinned_versions_are_fine_and_another_python_is_not():
    assert [f.level for f in machine.check_versions(GOOD.get, (3, 11))] == [OK]
    assert [f.subject for f in machine.check_versions(GOOD.get, (3, 13))] == ["Python"]
    gpu = GOOD | {"torch": "2.14.1+cu130"}
    assert [f.level for f in machine.check_versions(gpu.get, (3, 12), True)] == [OK]
    (found,) = machine.check_versions(gpu.get, (3, 11), True)
    assert (found.level, found.subject) == (WARNING, "Python") and "of 3.12 only" in found.text

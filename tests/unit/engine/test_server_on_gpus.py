"""Flags and environment of a server on CUDA: kernels of experts that record routes, float32 as float32, overlap where it may be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from r3train.config import RunConfig
from r3train.engine.key import ENGINE_KEY_VARIABLE
from r3train.engine.refusals import UNRECORDED_BACKENDS
from r3train.engine.server import SGLangServer
from r3train.launch.start.local_servers import build_server
from tests.unit.hf_model import facts

RECIPE = Path(__file__).parents[3] / "configs/qwen3_30b_a3b_one_node.toml"
BACKEND, OVERLAP = "--moe-runner-backend", "--disable-overlap-schedule"


def command_of(device: str = "cuda", routes: bool = True, **flags: object) -> list[str]:
    server = SGLangServer(
        "m", "log", device=device, return_routed_experts=routes, server_args=flags
    )
    return server.command()


ON_A_CPU = (
    "--device cpu --mem-fraction-static 0.3 --max-total-tokens 32768 --sleep-on-idle"
    " --skip-server-warmup"
)


@pytest.mark.parametrize(
    "device, own", [("cuda", "--moe-runner-backend triton"), ("cpu", ON_A_CPU)]
)
def test_a_servers_whole_command(device, own):
    server = SGLangServer(
        "a/model",
        "log",
        dtype="bfloat16",
        server_args={"tp-size": 2},
        return_routed_experts=True,
        seed=9,
        port=30001,
        device=device,
    )
    program = [sys.executable, "-m", "r3train.engine.launch_server"]
    expected = (
        "--dtype bfloat16 --random-seed 9 --weight-version 0 --skip-tokenizer-init"
        " --disable-overlap-schedule --enable-return-routed-experts --log-level-http warning"
        f" {own} --tp-size 2 --model-path a/model --host 127.0.0.1 --port 30001"
    )
    assert server.command() == program + expected.split()


def test_a_gpt_oss_server_has_attention_with_sinks_on_a_cpu(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    of = {device: SGLangServer(tmp_path, "log", device=device) for device in ("cpu", "cuda")}
    assert "--attention-backend triton" in " ".join(of["cpu"].command())
    assert "--attention-backend" not in of["cuda"].command()


@pytest.mark.parametrize(
    "family, overlaps", [("qwen3_moe", True), ("qwen3_next", False), ("nemotron_h", False)]
)
def test_a_server_with_linear_attention_does_not_overlap_on_a_cpu(family, overlaps, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    for device in ("cpu", "cuda"):
        server = SGLangServer(tmp_path, "log", exact_boundaries=False, device=device)
        expected = overlaps or device == "cuda"
        assert ("--disable-overlap-schedule" not in server.command()) == expected


@pytest.mark.parametrize(
    "device, own",
    [
        ("cuda", {"NVIDIA_TF32_OVERRIDE": "0"}),
        (
            "cpu",
            {
                "OMP_NUM_THREADS": "1",
                "SGLANG_MAMBA_CONV_DTYPE": "bfloat16",
                "SGLANG_DISABLED_MODEL_ARCHS": "",
            },
        ),
    ],
)
@pytest.mark.parametrize("key", [None, "a-key"])
def test_a_servers_whole_environment(device, own, key, monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "of-the-shell")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "1")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    server = SGLangServer("m", "log", device=device, dtype="bfloat16", api_key=key)
    expected = {"PATH": "/bin", "HF_HUB_OFFLINE": "1"} | own
    expected |= {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    if key:
        expected[ENGINE_KEY_VARIABLE] = key
    nccl = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert server.environment() == expected | nccl


def test_a_server_that_says_what_its_indexers_chose_says_tokens_and_not_places(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "1")
    dense = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
    monkeypatch.setenv(dense, "4096")
    for device, fused in (("cuda", "0"), ("cpu", "1")):
        server = SGLangServer("m", "log", device=device, return_indexer_topk=True)
        assert "--enable-return-indexer-topk" in server.command()
        assert server.environment()["SGLANG_DSA_FUSE_TOPK"] == fused
        assert server.environment().get(dense) == {"cuda": None, "cpu": "4096"}[device]
        other = SGLangServer("m", "log", device=device)
        assert "--enable-return-indexer-topk" not in other.command()
        assert other.environment()["SGLANG_DSA_FUSE_TOPK"] == "1"


def test_servers_of_a_run_say_what_indexers_chose_where_that_is_replayed(tmp_path):
    config = RunConfig.from_toml(RECIPE)
    for topk, said in ((None, False), (64, True), (10**6, False)):
        hf = facts(index_topk=topk, max_position_embeddings=4096)
        assert build_server(config, hf, tmp_path / "log", {}, 0).return_indexer_topk == said
    with pytest.raises(ValueError, match="tp_size = 2 cannot go with --use-rollout-routing-replay"):
        build_server(config, facts(index_topk=64), tmp_path / "log", {"tp_size": 2}, 0)


def test_a_key_of_the_shell_is_not_inherited_even_by_its_name(monkeypatch):
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "of-the-shell")
    server = SGLangServer("m", "log", device="cuda", env_names=(ENGINE_KEY_VARIABLE,))
    assert ENGINE_KEY_VARIABLE not in server.environment()


def test_experts_run_on_kernels_that_record_their_routes_where_routes_are_asked_for():
    command = command_of()
    assert command[command.index(BACKEND) + 1] == "triton"
    assert "triton" not in UNRECORDED_BACKENDS
    assert BACKEND not in command_of(routes=False), "without R3 SGLang may choose"
    assert BACKEND not in command_of("cpu"), "triton's kernels are those of a GPU"


@pytest.mark.parametrize("name", ["moe_runner_backend", "--moe-runner-backend", "moe-runner"])
def test_a_backend_of_experts_that_is_given_is_taken(name):
    command = command_of(**{name: "flashinfer_trtllm_routed"})
    given = [word for word in command if word.startswith("--moe-runner")]
    assert len(given) == 1
    assert command[command.index(given[0]) + 1] == "flashinfer_trtllm_routed"


def test_a_way_between_gpus_brings_kernels_of_its_own():
    assert BACKEND not in command_of(moe_a2a_backend="deepep")


def test_float32_is_multiplied_as_float32_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    of = {
        device: SGLangServer("m", "log", device=device).environment() for device in ("cpu", "cuda")
    }
    assert of["cuda"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "NVIDIA_TF32_OVERRIDE" not in of["cpu"]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert SGLangServer("m", "log", device="cuda").environment()["NVIDIA_TF32_OVERRIDE"] == "1"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("given", [{}, {"disable_overlap_schedule": True}])
@pytest.mark.parametrize(
    "mode, overlaps", [("drain", True), ("in_place", False), ("abort", False), ("retract", False)]
)
def test_servers_overlap_scheduling_and_computing_unless_updates_come_in_mid_generation(
    mode, overlaps, given, device
):
    config = RunConfig.from_toml(RECIPE)
    rollout = config.rollout.model_copy(update={"pause_generation_mode": mode})
    config = config.model_copy(update={"rollout": rollout})
    command = build_server(config, facts(), Path("log"), given, 0, device=device).command()
    assert (OVERLAP not in command) == (overlaps and not given)
    # one that no run has configured must have exact versions
    assert OVERLAP in command_of(device)

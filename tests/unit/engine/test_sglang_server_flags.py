"""The server's command line and environment, without starting it."""

import pytest

from r3train.engine.flags import check_server_flags, known_flags, server_fields
from r3train.engine.server import (
    SGLangServer,
    free_port,
    log_tail,
    other_models,
    server_flags,
    start_stage,
)

NOT_IMPORTED = "SGLANG_DISABLED_MODEL_ARCHS"


def value_of(command, flag):
    return command[command.index(flag) + 1]


def test_flags_are_spelled_as_sglang_reads_them():
    args = {"tp_size": 2, "a_b": True, "off": False, "none": None, "xs": [1, 2], "f": 0.5}
    assert server_flags(args) == ["--tp-size", "2", "--a-b", "--xs", "1", "2", "--f", "0.5"]


def test_a_cpu_server_is_started_for_exact_versions_and_an_idle_core(tmp_path):
    server = SGLangServer("m", tmp_path / "log", return_routed_experts=True, device="cpu", seed=9)
    command = server.command()
    for flag in (
        "--disable-overlap-schedule",
        "--sleep-on-idle",
        "--skip-server-warmup",
        "--skip-tokenizer-init",
        "--enable-return-routed-experts",
    ):
        assert flag in command
    assert value_of(command, "--device") == "cpu" and value_of(command, "--random-seed") == "9"
    assert value_of(command, "--weight-version") == "0"
    assert value_of(command, "--host") == "127.0.0.1" and "--api-key" not in command
    assert server.environment()["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    "model_type, language_model_only",
    [("qwen3_5_moe", True), ("qwen3_vl_moe", True), ("kimi_k25", True), ("qwen3_next", False)],
)
def test_a_server_of_a_model_of_text_and_images_builds_no_vision_tower(
    model_type, language_model_only, tmp_path
):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}", "text_config": {{}}}}')
    command = SGLangServer(tmp_path, tmp_path / "log", device="cuda").command()
    assert ('{"language_model_only": true}' in command) == language_model_only


def test_a_cuda_server_gets_generic_flags_alone(tmp_path):
    command = SGLangServer("m", tmp_path / "log", device="cuda").command()
    for flag in (
        "--device",
        "--sleep-on-idle",
        "--max-total-tokens",
        "--mem-fraction-static",
        "--skip-server-warmup",
        "--enable-return-routed-experts",
    ):
        assert flag not in command


@pytest.mark.parametrize(
    "architecture, file",
    [("Qwen3MoeForCausalLM", "qwen3_moe"), ("DeepseekV3ForCausalLM", "deepseek_v2")],
)
def test_a_cpu_server_imports_no_models_but_its_own(architecture, file, tmp_path, monkeypatch):
    monkeypatch.delenv(NOT_IMPORTED, raising=False)
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    of = {
        device: SGLangServer(tmp_path, tmp_path / "log", device=device).environment()
        for device in ("cpu", "cuda")
    }
    left_out = of["cpu"][NOT_IMPORTED].split(",")
    assert file not in left_out and {"llama", "grok"} <= set(left_out)
    assert NOT_IMPORTED not in of["cuda"]


@pytest.mark.parametrize("config", [None, "{}", '{"architectures": ["OfNobody"]}'])
def test_a_model_that_sglang_does_not_have_by_name_leaves_no_file_out(config, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert other_models(tmp_path) == ""


def test_adapters_are_served_by_sglangs_own_backend_but_on_a_cpu(tmp_path):
    adapters = {"enable_lora": True, "max_lora_rank": 8}
    commands = {
        device: SGLangServer("m", tmp_path / "log", device=device, adapter_flags=adapters).command()
        for device in ("cpu", "cuda")
    }
    assert all("--enable-lora" in command for command in commands.values())
    assert value_of(commands["cpu"], "--lora-backend") == "torch_native"
    assert "--lora-backend" not in commands["cuda"]


@pytest.mark.parametrize("key", ["max_total_tokens", "max-total-tokens", "--max-total-tokens"])
def test_passthrough_arguments_win_over_the_defaults(tmp_path, key):
    server = SGLangServer("m", tmp_path / "log", device="cpu", server_args={key: 77})
    assert value_of(server.command(), "--max-total-tokens") == "77"
    assert server.command().count("--max-total-tokens") == 1


def test_the_trainers_process_group_is_hidden_from_the_server(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    environment = SGLangServer("m", tmp_path / "log", device="cpu").environment()
    assert environment["PATH"] and environment["HF_HUB_OFFLINE"] == "1"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & environment.keys()
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment


SECRETS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "R3TRAIN_JUDGE_API_KEY",
    "R3TRAIN_TEACHER_API_KEY",
    "DATABASE_URL",
    "MLFLOW_TRACKING_PASSWORD",
    "SLURM_JWT",
    "SSH_AUTH_SOCK",
    "GITHUB_TOKEN",
)
NEEDED = (
    "PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "SGLANG_PORT_RANGE",
    "HF_HOME",
    "TRITON_CACHE_DIR",
    "NVSHMEM_DIR",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",
    "UCX_TLS",
    "FI_PROVIDER",
)


def test_a_server_gets_what_it_needs_of_the_environment_and_nobodys_secrets(tmp_path, monkeypatch):
    for name in (*SECRETS, *NEEDED):
        monkeypatch.setenv(name, f"value of {name}")
    environment = SGLangServer("m", tmp_path / "log", device="cpu").environment()
    assert {name: environment.get(name) for name in NEEDED} == {n: f"value of {n}" for n in NEEDED}
    assert not environment.keys() & set(SECRETS)
    named = SGLangServer("m", tmp_path / "log", device="cpu", env_names=("HF_TOKEN", "NOT_SET"))
    assert named.environment()["HF_TOKEN"] == "value of HF_TOKEN"
    assert "NOT_SET" not in named.environment()


def test_the_tail_of_a_log_is_its_last_lines_and_nothing_for_no_file(tmp_path):
    path = tmp_path / "log"
    path.write_text("\n".join(f"line {i}" for i in range(20000)))
    assert log_tail(path, 2) == "line 19998\nline 19999"
    assert log_tail(tmp_path / "none") == ""


def test_the_stage_of_a_start_is_what_the_log_of_this_start_told_last(tmp_path):
    """Warnings and other lines say nothing of it, nor does the start before a restart."""
    path, seen = tmp_path / "log", []
    lines = (
        "launch_server.py:71: UserWarning: use another\n  warnings.warn(",
        "[2026-11-24 18:01:59] Load weight begin. avail mem=20.23 GB",
        "Loading safetensors checkpoint shards:  50% Completed | 1/2\n  warnings.warn(",
        "[2026-11-24 18:02:00] Load weight end. elapsed=0.05 s, type=Qwen3MoeForCausalLM",
        "[2026-11-24 18:02:00] Capture decode CUDA graph begin. avail mem=20.23 GB",
    )
    for line in lines:
        with path.open("a") as file:
            file.write(line + "\n")
        seen.append(start_stage(path, 0))
    loading = "loading weights"
    assert seen == ["", loading, loading, "allocating the KV cache", "capturing CUDA graphs"]
    assert start_stage(path, path.stat().st_size) == "" == start_stage(tmp_path / "none", 0)


def test_unchunked_prefill_with_routes_is_refused_before_it_kills_the_server(tmp_path):
    args = {"chunked-prefill-size": -1}
    SGLangServer("m", tmp_path / "log", device="cpu", server_args=args)
    with pytest.raises(
        ValueError, match="chunked_prefill_size = -1 cannot go with .* kills the server"
    ):
        SGLangServer("m", tmp_path / "log", server_args=args, return_routed_experts=True)


def test_a_flag_that_sglang_does_not_have_is_refused_with_the_nearest_one():
    check_server_flags({"mem_fraction_static": 0.3, "tp": 2, "disable-radix-cache": True})
    message = "--sglang-mem-fracton: .*Did you mean --sglang-mem-fraction-static"
    with pytest.raises(ValueError, match=message):
        check_server_flags({"mem_fracton": 0.3})


def test_aliases_and_prefixes_are_the_fields_that_sglang_makes_of_them():
    given = {"pipeline-parallel-size": 2, "enable-hicache": True, "model": "m", "tp": 2}
    wanted = {"pp_size": 2, "enable_hierarchical_cache": True, "model_path": "m", "tp_size": 2}
    assert server_fields(given) == wanted
    assert server_fields({"pp_size": 1, "pipeline_parallel_size": 2}) == {"pp_size": 2}


def test_every_flag_that_a_server_is_started_with_is_one_that_sglang_has(tmp_path):
    """Flags that every server of ours is started with are found in SGLang's source."""
    for device in ("cpu", "cuda"):
        server = SGLangServer("m", tmp_path / "log", return_routed_experts=True, device=device)
        ours = [word[2:] for word in server.command() if word.startswith("--")]
        assert len(known_flags()) > 500
        server_fields(dict.fromkeys(ours))


def test_a_free_port_is_none_that_an_outgoing_connection_may_take_before_the_server_does():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 10 and max(ports) < first


def test_an_address_of_another_machine_has_no_free_port():
    with pytest.raises(OSError, match="192.0.2.1: 100 ports"):
        free_port("192.0.2.1")

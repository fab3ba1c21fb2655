"""Bad input ends with a clear error before any server starts: the whole command, up to that point."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from aiohttp import web
from click.testing import CliRunner

import train_async
from r3train.launch.start import rank as rank_program
from r3train.families.read_facts import read_hf_facts
from r3train.config.options import parse_train_flags
from r3train.cpu.device import prepare_device
from r3train.data.tokenizer import load_tokenizer
from r3train.launch.job.other_models import check_other_model, served_teacher
from r3train.launch.job import model_checks
from r3train.launch.job.model_checks import check_class, check_linear_kernels, check_sinks
from r3train.launch.job.preflight import By, preflight
from r3train.launch.job.limits import server_ports
from r3train.launch.job.resume import resume_point, run_facts
from r3train.families.published import PUBLISHED, published_names
from r3train.trainer.megatron.saved_state import LATEST, STATE
from tests.http_serving import in_a_thread
from tests.messages import transcripts

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ("--config", str(ROOT / "configs/tiny_cpu.toml"))


def start(tiny: Path, *flags: str, world_size: int | None = 2, environment: dict = {}):
    """Run the command as torchrun's rank 0 would; it must not get as far as joining the ranks.

    world_size: None as plain python would.
    """
    ranks = {} if world_size is None else {"RANK": "0", "WORLD_SIZE": str(world_size)}
    return transcripts.start(tiny, *flags, environment=ranks | environment)


def test_a_dry_run_without_torchrun_says_what_would_run(tiny):
    batch = (
        "--rollout-batch-size",
        "8",
        "--n-samples-per-prompt",
        "4",
        "--global-batch-size",
        "16",
    )
    result = start(tiny, "--dry-run", "--world-size", "2", *batch, world_size=None)
    assert result.exit_code == 0, result.output
    prompts = (tiny / "prompts.jsonl").read_text().splitlines()
    longest = max(len(json.loads(line)["input"].split()) for line in prompts)
    assert re.search(
        rf"# {len(prompts)} prompts of \d+ to {longest} tokens, median ", result.stdout
    )
    assert (
        f"# 60 rollouts of 8 prompts: an epoch is {len(prompts) / 8:.4g} rollouts" in result.stdout
    )
    assert "# a rollout is 32 samples and 2 optimizer steps of 16" in result.stdout
    assert "# 2 ranks, data-parallel size 2" in result.stdout
    assert "unless you do: NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0, CUDA_DEV" in result.stdout
    refused = start(tiny, "--world-size", "2", world_size=None)
    assert refused.exit_code == 2 and "r3train train starts the ranks of a machine" in words(
        refused
    )


def test_a_dry_run_estimates_every_rank_and_its_servers(tiny):
    pipeline = (
        *"--pipeline-model-parallel-size 2 --expert-model-parallel-size 1".split(),
        *"--sglang-tp-size 1 --rollout-max-context-len 60".split(),
    )
    checked = ("--use-rollout-routing-replay", "--enable-r3-correctness-check")
    flags = ("--dry-run", "--estimate", *checked, *pipeline)
    result = start(tiny, *flags, "--gpu-memory-gb", "40")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("# ")]
    first, last = (line.split() for line in lines if line.startswith("# recipe "))
    assert first[2:4] == ["PP2", "0-0"] and last[2:4] == ["PP2", "1-1"]
    found = " ".join(line.removeprefix("# ").strip() for line in lines)
    for text in (
        "2 GPUs of 40 GB (37.3 GiB) for training",
        "routes on the host of rank 0: 8 B per token",
        "evidence on disk, below the run directory: at most ",
        "each server, besides the GPUs that train, of 1 GPU: weights",
        "a pool of 8,192 tokens; 128 requests",
        "assumed: --sglang-tp-size; 0.30 of 37.3 GiB",
    ):
        assert text in found, found
    assert "estimated" not in start(tiny, "--dry-run").stdout
    refused = start(tiny, "--dry-run", "--gpu-memory-gb", "40")
    assert refused.exit_code == 2
    assert "--gpu-memory-gb 40 has no effect without --estimate" in words(refused)


def test_an_estimate_needs_no_weights_tokenizer_prompts_and_servers(tmp_path, monkeypatch):
    """They become notes; a setting that is wrong, or does not go with the model, is refused as ever."""
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "configs/qwen3_30b_a3b.toml")
    environment = {"RANK": None, "WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None}

    def dry_run(*flags):
        given = ["--config", recipe, "--dry-run", "--world-size", "8", *flags]
        return CliRunner().invoke(train_async.main, given, env=environment)

    result = dry_run("--estimate", "--rollout-external-engine-addrs", "127.0.0.1:9")
    assert result.exit_code == 0, result.output
    for text in (
        "# a run is refused here: 127.0.0.1:9: does not answer",
        "# a run is refused here: models/Qwen3-30B-A3B: no such checkpoint directory",
        "Qwen3-30B-A3B's published config.json counts",
        " 68.2 92% ",
    ):
        assert text in " ".join(result.stdout.split()), result.stdout
    apart = ("--rollout-external-engine-addrs", "127.0.0.1:9")
    split = ("--expert-tensor-parallel-size", "2", "--expert-model-parallel-size", "4")
    for flags, said in (
        ((), "models/Qwen3-30B-A3B: no such checkpoint directory"),
        (("--estimate", "--lr", "-1"), "greater than or equal to 0"),
        (("--estimate", "--global-batch-size", "100"), "is not a multiple of global_batch_size"),
        (("--estimate", "--rm-type", "nothing"), "nothing"),
        (("--estimate", "--pipeline-model-parallel-size", "5"), "is not a multiple of"),
        (("--estimate", "--hf-checkpoint", "models/x"), "models/x/config.json: no such file"),
        (("--estimate", "--hf-checkpoint", "models/gpt-oss-20b", *split), "experts have biases"),
    ):
        result = dry_run(*apart, *flags)
        assert result.exit_code == 2 and said in words(result), result.output


def test_the_first_line_comes_before_torch_is_imported():
    code = """
import sys, click
def echo(*words, **how):
    print("torch" in sys.modules, *words)
    sys.exit(0)
click.echo = echo
import train_async
train_async.main(sys.argv[1:])
"""
    recipe = ("--config", "configs/tiny_cpu.toml", "--dry-run", "--world-size", "2")
    command = [sys.executable, "-c", code, *recipe]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False checking the settings, the checkpoint and the data ...\n", done


@pytest.mark.parametrize("colocate", [False, True])
def test_rank_0_starts_its_servers_before_it_imports_torch_unless_they_share_its_memory(
    colocate, tiny, tmp_path
):
    code = """
import sys
from r3train.engine.server import SGLangServer
def start(self, *_):
    print("a server starts, torch is imported:", "torch" in sys.modules, flush=True)
    sys.exit(0)
SGLangServer.start = start
from r3train.launch.start import train
from types import SimpleNamespace
joined = SimpleNamespace(run=lambda *_: print("ranks join"))
sys.modules["r3train.launch.start.rank"] = joined
train.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, *RECIPE, "--hf-checkpoint", str(tiny / "model")]
    command += ["--prompt-data", str(tiny / "prompts.jsonl"), "--run-dir", str(tmp_path / "run")]
    command += ["--colocate", "--max-weight-staleness", "0"] if colocate else []
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environment = os.environ | ranks
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    first = "ranks join" if colocate else "a server starts, torch is imported: False"
    assert done.stdout.splitlines()[:1] == [first], done


@pytest.mark.parametrize(
    "flag", ["--num-rollouts=3", "--num-rollout=0", "--rm-type=no_such_reward"]
)
def test_a_nodes_other_ranks_let_the_first_one_name_the_mistake(flag, tiny, monkeypatch):
    waited = []
    monkeypatch.setattr("r3train.config.options.time.sleep", waited.append)
    assert start(tiny, flag, environment={"LOCAL_RANK": "0"}).exit_code == 2 and not waited
    late = start(tiny, flag, environment={"RANK": "1", "LOCAL_RANK": "1"})
    assert late.exit_code == 2 and waited == [10.0] and flag.partition("=")[0] in late.output


def test_a_nodes_first_rank_alone_reads_the_data(tiny, tmp_path, monkeypatch):
    """A rank that reads nothing starts where the others do, and leaves the comparison to them."""
    saved = tmp_path / "saved/iter_0000003"
    saved.mkdir(parents=True)
    (saved.parent / LATEST).write_text("3\n")
    facts = {"lora": None, "prompt_data_sha256": "of another file"}
    state = {"num_rollouts": 3, "weight_version": 3, "topology": {"world_size": 4}, "run": facts}
    (saved / STATE).write_text(json.dumps(state))
    data = ["--prompt-data", str(tiny / "prompts.jsonl"), "--hf-checkpoint", str(tiny / "model")]
    recipe = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--load", str(saved.parent)]
    config = parse_train_flags([*data, *recipe], prog_name="train_async.py")
    with pytest.raises(ValueError, match="was trained on prompts of another content"):
        preflight(config, 2)
    for name in (
        "read_data.load_prompts",
        "preflight.load_tokenizer",
        "other_models.check_tensors",
    ):
        monkeypatch.setattr(f"r3train.launch.job.{name}", lambda *_, **__: 1 / 0)
    job = preflight(config, 2, By.RANK)
    assert job.prompts == [] and resume_point(job).start_rollout_id == 3 and run_facts(job) == {}
    job.close()
    number = {"RANK": "2", "LOCAL_RANK": "1"}
    monkeypatch.setattr("r3train.launch.start.rank.run", lambda *_: 7)
    other = start(tiny, world_size=4, environment=number)
    assert other.exit_code == 7, other.output
    first = start(tiny, world_size=4, environment=number | {"LOCAL_RANK": "0"})
    assert isinstance(first.exception, ZeroDivisionError)


def test_stop_tokens_are_added_to_the_checkpoints_own(tiny, tmp_path):
    flags = ("--rollout-stop-token-ids", "5", "--rollout-stop", "<pad>")
    config = parse_train_flags(
        [
            "--config",
            str(ROOT / "configs/tiny_cpu.toml"),
            *flags,
            "--hf-checkpoint",
            str(tiny / "model"),
            "--prompt-data",
            str(tiny / "prompts.jsonl"),
        ],
        prog_name="train",
    )
    job = preflight(config, 2)
    job.close()
    pad = load_tokenizer(tiny / "model").get_added_vocab()["<pad>"]
    assert job.stop_token_ids == (*job.hf.eos_token_ids, 5, pad) and job.hf.eos_token_ids


def test_good_input_passes_the_dry_run_and_prints_the_resolved_config(tiny):
    result = start(tiny, "--dry-run", "--lr", "0.5")
    assert result.exit_code == 0, result.output
    assert "lr = 0.5" in result.output


@pytest.mark.parametrize("backend", ["auto", "te", "local"])
def test_a_cuda_device_without_transformer_engines_torch_part_is_refused(
    backend, tiny, tmp_path, monkeypatch
):
    # installed without its part for torch, as pip leaves it where that part was not compiled
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    # an imported one would stay for the tests that follow in this process
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "transformer_engine")
    flags = ["--dry-run", "--attention-backend", backend]
    assert start(tiny, *flags).exit_code == 0  # a login node has no device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = start(tiny, *flags)
    assert result.exit_code == 2, result.output
    named = "hide the device" if backend == "local" else "transformer_engine.pytorch"
    assert f"--attention-backend {backend}" in result.output and named in result.output


@pytest.mark.parametrize("found", ["", "0.4.2", "0.5.2", "0.6.0"])
def test_kernels_of_linear_attention_that_are_lacking_or_wrong_on_hopper_are_refused(
    found, monkeypatch
):
    def version_of(name: str) -> str:
        assert name == "fla-core"
        if not found:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(model_checks, "version", version_of)
    if found >= "0.5":
        return check_linear_kernels("qwen3_next")
    with pytest.raises(ValueError, match=f"fla-core {found or 'is not installed'}; expected 0.5.2"):
        check_linear_kernels("qwen3_next")


@pytest.mark.parametrize(
    "found, said",
    [
        ({}, "mamba-ssm is not installed; expected 2.0 or later"),
        ({"mamba-ssm": "2.3.1"}, "causal-conv1d is not installed; expected 1.4 or later"),
        ({"mamba-ssm": "2.3.1", "causal-conv1d": "1.3.0"}, "causal-conv1d 1.3.0; expected 1.4"),
        ({"mamba-ssm": "2.3.1", "causal-conv1d": "1.6.0"}, None),
    ],
)
def test_kernels_of_mamba_mixers_that_are_lacking_or_too_old_are_refused(found, said, monkeypatch):
    def version_of(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(model_checks, "version", version_of)
    if said is None:
        return check_linear_kernels("nemotron_h")
    with pytest.raises(ValueError, match=f"nemotron_h on a CUDA device: {said}"):
        check_linear_kernels("nemotron_h")


CUT = ["--context-parallel-size", "2"]


def test_attention_that_transformer_engine_lacks_on_a_cuda_device_is_refused(tiny, monkeypatch):
    recipe = ["--config", str(ROOT / "configs/gpt_oss_20b.toml")]
    exchange = ["--transformer-override", "cp_comm_type=a2a"]
    whole, by_p2p, by_a2a = (
        parse_train_flags([*recipe, *more], prog_name="train_async.py")
        for more in ([], CUT, [*CUT, *exchange])
    )
    for config in (whole, by_a2a):
        with pytest.raises(ValueError, match="2.11.0 has no attention with sinks for packed"):
            check_sinks("gpt_oss", "2.11.0", config)
        check_sinks("gpt_oss", "2.12.0", config)
        check_sinks("gpt_oss", "2.20.2+abc", config)
    with pytest.raises(ValueError, match="'p2p'.*--transformer-override cp_comm_type=a2a only"):
        check_sinks("gpt_oss", "2.12.0", by_p2p)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    cut = ("--dry-run", "--world-size", "2", *CUT)
    refused = start(tiny, *cut)
    assert refused.exit_code == 2
    assert "--context-parallel-size above 1 on a CUDA device needs --bf16" in words(refused)
    assert "needs --bf16" not in words(start(tiny, *cut, "--bf16"))


def words(result) -> str:
    return " ".join(result.output.split())


def with_prompts(tiny: Path, directory: Path, *records: dict) -> list[str]:
    """Flags that name a file of these prompts."""
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["--prompt-data", str(path)]


def test_the_dry_run_shows_the_first_prompt_as_rendered_with_its_tokens(tiny, tmp_path):
    content = json.loads((tiny / "model/tokenizer_config.json").read_text())
    model = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    content["chat_template"] = "{% for m in messages %}cat {{ m.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(content))
    first = json.loads((tiny / "prompts.jsonl").read_text().splitlines()[0])["input"]
    result = start(tiny, "--dry-run", "--apply-chat-template", "--hf-checkpoint", str(model))
    assert result.exit_code == 0, result.output
    assert "# first prompt (prompts.jsonl:1, " in result.output
    assert repr(f"cat {first}") in result.output
    tokens = [re.escape(repr(word)) for word in ("cat", *first.split())]
    assert re.search(
        "# its tokens: " + " ".join(rf"\d+ {token}" for token in tokens), result.output
    )
    assert tomllib.loads(result.stdout)["run"]["dry_run"], "the output stays TOML"


def test_several_files_with_slices_and_weights(tiny, tmp_path):
    rows = (tiny / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "more").mkdir()
    for path in (tmp_path / "prompts.jsonl", tmp_path / "more/prompts.jsonl"):
        path.write_text("".join(rows[:10]))
    files = [f"{tmp_path}/prompts.jsonl@[2:5]*0.7", f"{tmp_path}/more/prompts.jsonl*0.3"]
    result = start(tiny, "--dry-run", "--prompt-data", *files)
    assert result.exit_code == 0, result.output
    assert f"first prompt ({tmp_path}/prompts.jsonl:3, " in result.output
    assert tomllib.loads(result.stdout)["data"]["prompt_data"] == files


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 in config.json, the actor has 1e-06"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False in config.json, the actor has True"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters is "),
        # as an older transformers writes the same
        ({"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}, None),
        ({"max_position_embeddings": 4096, "torch_dtype": "bfloat16", "use_cache": False}, None),
    ],
)
def test_a_reference_with_other_constants_than_the_actors_is_refused(
    changes, refusal, tiny, tmp_path
):
    other = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    content = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(content | changes))
    check = partial(check_other_model, "--ref-load", other, read_hf_facts(tiny / "model"))
    if refusal is None:
        check()
        return
    with pytest.raises(ValueError, match=f"^--ref-load {other}: {re.escape(refusal)}"):
        check()


def with_another_word(model: Path, place: Path) -> Path:
    """The checkpoint with one word of its vocabulary renamed."""
    other = Path(shutil.copytree(model, place))
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"cat"', '"kat"'))
    return other


def test_a_served_teacher_is_asked_for_its_vocabulary_before_anything_starts(tiny, tmp_path):
    theirs = [load_tokenizer(tiny / "model")]

    async def handle(request):
        ids = (await request.json())["tokens"]
        return web.json_response({"text": [theirs[0].decode(own) for own in ids]})

    with in_a_thread(handle) as addr:
        taught = ["--dry-run", "--use-opd", "--opd-type", "sglang", "--opd-teacher-url", addr]
        result = start(tiny, *taught)
        assert result.exit_code == 0, result.output
        theirs[0] = load_tokenizer(with_another_word(tiny / "model", tmp_path / "model"))
        result = start(tiny, *taught)
        assert result.exit_code == 2 and "is 'kat' there and 'cat' here" in words(result)


@pytest.mark.parametrize(
    "flags, at_once",
    [
        ((), 64),
        (("--sglang-server-concurrency", "16", "--rollout-num-engines", "2"), 32),
        (("--rollout-max-concurrency", "5"), 5),
    ],
)
async def test_a_served_teacher_gets_as_many_requests_at_once_as_the_servers(flags, at_once, tiny):
    words = ["--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")]
    words += ["--num-rollout", "2", "--rollout-batch-size", "4", "--rollout-max-response-len", "8"]
    words += ["--use-opd", "--opd-type", "sglang", "--opd-teacher-url", "http://127.0.0.1:9"]
    config = parse_train_flags([*words, *flags], prog_name="train")
    teacher = served_teacher(config)
    assert teacher._slots._value == at_once
    await teacher.aclose()


def test_an_export_is_refused_where_its_place_can_be_written_and_the_one_beside_it_cannot(
    tiny, tmp_path, monkeypatch
):
    """It is written next to its place and renamed."""
    tried = []
    monkeypatch.setattr(
        "r3train.launch.job.run_dir.tempfile.TemporaryFile",
        lambda dir: tried.append(dir) or contextlib.nullcontext(),
    )
    (tmp_path / "hf").mkdir()
    run = ("--run-dir", str(tmp_path / "run"))
    assert start(tiny, "--dry-run", *run, "--save-hf", str(tmp_path / "hf")).exit_code == 0
    assert tried == [tmp_path, tmp_path]


@pytest.mark.parametrize(
    "flags, row, warns",
    [
        (["--rm-type", "code"], {}, True),
        (["--rm-type", "boxed_code"], {}, True),
        ([], {"metadata": {"rm_type": "code"}}, True),
        ([], {}, False),
    ],
)
def test_programs_that_have_the_network_are_a_warning(
    flags, row, warns, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("r3train.launch.job.preflight.isolation", lambda: ())
    prompts = with_prompts(tiny, tmp_path, {"input": "cat", "label": ["assert f(1) == 2"]} | row)
    result = start(tiny, "--dry-run", *prompts, *flags)
    assert result.exit_code == 0, result.output
    assert ("warning: programs of the reward code have the network" in words(result)) == warns


def saved(directory: Path, number: int = 3, **facts) -> Path:
    """Write what preflight reads of a checkpoint; returns the file of its state."""
    path = directory / f"iter_{number:07d}"
    path.mkdir(parents=True)
    (directory / LATEST).write_text(f"{number}\n")
    state = {"num_rollouts": number, "weight_version": number, "topology": {"world_size": 2}}
    (path / STATE).write_text(json.dumps(state | facts))
    return path / STATE


@pytest.mark.parametrize("name", published_names())
def test_published_models_name_the_class_of_their_servers(name):
    check_class(read_hf_facts(PUBLISHED / name))


def held_port() -> tuple[socket.socket, int]:
    """Listen on a port that nobody takes meanwhile, nor the one below it.

    It lies below those that the system gives to outgoing connections, and those of our local servers.
    """
    for port in random.SystemRandom().sample(range(12001, 20000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port - 1)):
            return socket.create_server(("127.0.0.1", port)), port
    raise AssertionError("100 ports were tried, and none is free with the one below it")


def test_ports_and_descriptors_that_a_start_lacks_are_found_before_it(tiny, monkeypatch):
    held, port = held_port()
    with held:
        two = ("--sglang-port", str(port - 1), "--rollout-num-engines", "2")
        for flags in (
            ("--sglang-port", str(port)),
            two,
            ("--sglang-nccl-port", str(port)),
            ("--metrics-port", str(port)),
        ):
            refused, said = (
                start(tiny, *flags),
                f"port {port} of 127.0.0.1 is taken: choose another",
            )
            assert refused.exit_code == 2, refused.output
            assert f"Error: {said}" in words(refused)
            elsewhere = start(tiny, "--dry-run", *flags)  # it may be on a login node
            assert elsewhere.exit_code == 0, elsewhere.output
            assert f"warning: {said}" in words(elsewhere)
        served = ("--rollout-external-engine-addrs", f"127.0.0.1:{port}")
        assert not server_ports(parse_train_flags([*RECIPE, *served], prog_name="train_async.py"))[
            1
        ]
    monkeypatch.setattr("r3train.launch.job.limits.resource.getrlimit", lambda _: (256, 256))
    flags = ("--sglang-port", str(port), "--rollout-max-concurrency", "100")
    refused, said = start(tiny, *flags), "100 requests in flight and the rest need about 300 open"
    assert refused.exit_code == 2 and f"Error: {said} files" in words(refused)
    elsewhere = start(tiny, "--dry-run", *flags)
    assert elsewhere.exit_code == 0 and f"warning: {said} files" in words(elsewhere)
    for more in (("--rollout-num-engines", "2"), ("--sglang-port", str(port))):
        refused = start(tiny, "--sglang-nccl-port", str(port), *more)
        assert refused.exit_code == 2 and f"port {port} is asked for twice" in words(refused)


def test_a_port_of_the_servers_before_a_restart_is_waited_for(tiny, monkeypatch):
    held, port = held_port()
    monkeypatch.setattr("r3train.launch.job.limits.time.sleep", lambda _: held.close())
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    result = start(tiny, "--dry-run", "--sglang-port", str(port), environment=again)
    assert result.exit_code == 0 and "is taken" not in result.output, result.output


def test_little_shared_memory_is_a_warning(tiny):
    result = start(tiny, "--dry-run", environment={"LOCAL_WORLD_SIZE": "900000"})
    assert result.exit_code == 0, result.output
    assert re.search(r"warning: /dev/shm has [\d,]+ MiB, the ranks need", words(result))


def test_a_dry_run_without_torchrun_does_not_count_all_ranks_on_this_machine(tiny, monkeypatch):
    monkeypatch.setattr("r3train.launch.job.limits.shared_memory_bytes", lambda num_ranks: 1 << 60)
    result = start(tiny, "--dry-run", environment={"LOCAL_WORLD_SIZE": None})
    assert result.exit_code == 0 and "/dev/shm" not in result.output, result.output


def test_a_run_that_code_of_the_user_ends_by_sys_exit_0_ends_with_1(tiny, tmp_path, monkeypatch):
    """Wherever it is called from: the estimator's and the loss's own names are other tests'."""
    prepare_device()  # before Megatron is imported
    config = parse_train_flags([*RECIPE, "--hf-checkpoint", str(tiny / "model")], prog_name="x")
    prepare_device()  # some of what is replaced imports Megatron
    recorded = []
    log = SimpleNamespace(record_error=recorded.append)
    for name, stub in {
        "r3train.launch.start.rank.prepare_device": lambda **_: None,
        "r3train.trainer.megatron.topology.init_distributed": lambda *_: None,
        "r3train.trainer.megatron.topology.shutdown": lambda: None,
        "r3train.launch.start.rank.setup_logging": lambda *_, **__: log,
        "r3train.launch.start.rank.open_run_dir": lambda config, run_dir, broadcast: run_dir,
        "r3train.launch.start.run_rank.RankOfRun.train": lambda *_: sys.exit(0),
    }.items():
        monkeypatch.setattr(name, stub)
    assert rank_program.run(SimpleNamespace(config=config), 0, tmp_path, [], os.getppid()) == 1
    assert [type(error) for error in recorded] == [SystemExit]

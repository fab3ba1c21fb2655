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
from r3train.launch.start import train as train_program
from r3train.cli import main
from r3train.config.hf_facts import EXPERT_KEYS, read_hf_facts
from r3train.config.options import parse_train_flags
from r3train.data.tokenizer import load_tokenizer
from r3train.hf_checkpoint import identity
from r3train.launch.job.other_models import check_other_model, served_teacher
from r3train.launch.job import preflight as preflight_module
from r3train.launch.job.preflight import check_class, check_linear_kernels, check_sinks, preflight
from r3train.launch.job.limits import server_ports
from r3train.launch.job.resume import resume_point, run_facts
from r3train.verify.tiny import build
from r3train.families.published import PUBLISHED, published_names
from r3train.families.tiny_options import TinyOptions
from r3train.trainer.megatron.saved_state import LATEST, STATE
from tests.http_serving import in_a_thread

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ("--config", str(ROOT / "configs/tiny_cpu.toml"))


def start(tiny: Path, *flags: str, world_size: int | None = 2, environment: dict = {}):
    """Run the command as torchrun's rank 0 would; it must not get as far as joining the ranks.

    world_size: None as plain python would.
    """
    ranks = {} if world_size is None else {"RANK": "0", "WORLD_SIZE": str(world_size)}
    return CliRunner().invoke(
        train_async.main,
        [
            *(() if "--config" in flags else RECIPE),
            "--use-rollout-routing-replay",
            "--hf-checkpoint",
            str(tiny / "model"),
            "--prompt-data",
            str(tiny / "prompts.jsonl"),
            *flags,
        ],
        env={"RANK": None, "WORLD_SIZE": None, **ranks, **environment},
    )


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
    refused = start(tiny, "--dry-run", "--world-size", "4")
    assert refused.exit_code == 2 and "torchrun has started 2 ranks" in words(refused)


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
def start(self):
    print("a server starts, torch is imported:", "torch" in sys.modules, flush=True)
    sys.exit(0)
SGLangServer.start = start
from r3train.launch.start import train
train.run = lambda *_: print("ranks join")
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
    for name in ("read_data.load_prompts", "preflight.load_tokenizer", "preflight.check_trainable"):
        monkeypatch.setattr(f"r3train.launch.job.{name}", lambda *_, **__: 1 / 0)
    job = preflight(config, 2, for_node=False)
    assert job.prompts == [] and resume_point(job).start_rollout_id == 3 and run_facts(job) == {}
    job.close()
    number = {"RANK": "2", "LOCAL_RANK": "1"}
    monkeypatch.setattr("r3train.launch.start.train.run", lambda *_: 7)
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
    refused = start(tiny, "--dry-run", "--rollout-stop", "cat dog")
    assert refused.exit_code == 2
    assert "--rollout-stop 'cat dog' is not one of the tokenizer's added tokens" in words(refused)


def test_good_input_passes_the_dry_run_and_prints_the_resolved_config(tiny):
    result = start(tiny, "--dry-run", "--lr", "0.5")
    assert result.exit_code == 0, result.output
    assert "lr = 0.5" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "prompts.jsonl:2:2: not JSON"),
        (json.dumps({"label": "x"}), "input"),
        (json.dumps({"input": "", "label": "x"}), "empty"),
        (json.dumps({"input": "cat " * 600, "label": "x"}), "tokens"),
        (json.dumps({"input": "cat"}), "--label-key"),
    ],
)
def test_a_bad_prompt_names_file_and_line(line, message, tiny, tmp_path):
    good = (tiny / "prompts.jsonl").read_text().splitlines()[0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"{good}\n{line}\n")
    flags = ["--overlong-prompts", "error", "--label-key", "label"]
    result = start(tiny, "--prompt-data", str(prompts), *flags)
    assert result.exit_code == 2
    assert "prompts.jsonl:2" in result.output and message in result.output


def test_rows_without_a_label_are_counted_where_a_users_reward_may_need_it(tiny, tmp_path):
    rows = [{"input": "cat", "label": "x"}] * 2 + [{"input": "cat"}] * 3
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    mine = ["--custom-rm-path", "tests.unit.reward_functions:half", "--dry-run"]
    result = start(tiny, "--prompt-data", str(tmp_path / "some.jsonl"), *mine)
    assert result.exit_code == 0, result.output
    assert "3 of 5 prompts have no label (key label), the first: some.jsonl:3" in result.output
    assert "have no label" not in start(tiny, *mine).output


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (["--prompt-data", "missing.jsonl"], 2, "missing.jsonl: no such prompt file"),
        (["--num-rollout", "0"], 2, "num-rollout"),
        (["--num-rollouts", "3"], 2, "--num-rollout"),
        (["--hf-checkpoint", "nowhere"], 2, "nowhere"),
        (["--tensor-model-parallel-size", "3", "--sequence-parallel"], 2, "world size 2"),
        (["--expert-model-parallel-size", "3"], 3, "experts"),
        (["--transformer-override", "moe_router_fusion=true"], 2, "moe_router_fusion"),
        (["--sglang-enable-return-routed-experts", "false"], 2, "routed"),
        (["--rm-type", "no_such_reward"], 2, "no_such_reward"),
    ],
)
def test_a_bad_setting_is_named(flags, world_size, message, tiny):
    result = start(tiny, *flags, world_size=world_size)
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        (None, [], "no such prompt file"),
        ("{not json", [], "jsonl:1:2: not JSON"),
        (json.dumps({"input": "name fruits", "label": ["apple"]}), [], ""),
        (json.dumps({"input": "name fruits", "label": 3}), [], "accepted_words needs a label"),
        (
            json.dumps({"input": "name fruits", "label": ["apple"]}),
            ["--eval-rm-type", "exact_match"],
            "exact_match needs a label of text",
        ),
        (
            json.dumps({"input": "name fruits", "label": ["apple"]}),
            ["--eval-rm-type", "no_such_reward"],
            "no_such_reward",
        ),
        (
            json.dumps({"input": "cat " * 120, "label": ["apple"]}),
            ["--eval-max-response-len", "450"],
            "max_response_len 450",
        ),
        (
            json.dumps({"input": "name fruits", "label": ["apple"]}),
            ["--eval-max-response-len", "5000"],
            "leaves no room for a prompt",
        ),
        (json.dumps({"q": "name fruits", "label": ["apple"]}), ["--eval-input-key", "q"], ""),
        (json.dumps({"input": "name fruits", "a": ["apple"]}), ["--eval-label-key", "a"], ""),
    ],
)
def test_an_evaluation_set_is_checked_by_its_own_settings(line, flags, message, tiny, tmp_path):
    """In a dry run of training and of ``r3train eval``."""
    path = tmp_path / "held_out.jsonl"
    if line is not None:
        path.write_text(f"{line}\n")
    sets = ["--eval-prompt-data", "held-out", str(path), *flags, "--dry-run"]
    alone = ["eval", str(tiny / "model"), *sets, "--rollout-max-response-len", "8"]
    alone += ["--rm-type", "accepted_words"]
    for result in (start(tiny, *sets), CliRunner().invoke(main, alone)):
        if message:
            assert result.exit_code == 2, result.output
            words = " ".join(result.output.split())
            assert message in words and "evaluation set held-out: " in words
        else:
            assert result.exit_code == 0, result.output
            assert 'eval_prompt_data = [\n    "held-out"' in result.output


def test_an_evaluation_without_a_set_or_a_length_is_refused(tiny):
    for flags, message in (
        (["--eval-max-response-len", "8"], "--eval-prompt-data is required"),
        (["--eval-prompt-data", "a", "b.jsonl"], "--rollout-max-response-len is required"),
    ):
        result = CliRunner().invoke(main, ["eval", str(tiny / "model"), *flags])
        assert result.exit_code == 2 and message in result.output, result.output


def test_a_dense_checkpoint_is_refused_with_r3(dense):
    result = start(dense)
    assert result.exit_code == 2 and "expert" in result.output


def test_all_faults_are_told_at_once(tiny):
    result = start(tiny, "--rm-type", "nothing", "--sglang-foo", "3", world_size=3)
    assert result.exit_code == 2
    for fault in ("world size 3 is not a multiple", "--sglang-foo", "--rm-type"):
        assert fault in result.output


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

    monkeypatch.setattr(preflight_module, "version", version_of)
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

    monkeypatch.setattr(preflight_module, "version", version_of)
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


def test_prompts_that_are_too_long_are_dropped_with_a_warning(tiny, tmp_path):
    good, long = {"input": "cat", "label": "cat"}, {"input": "cat " * 40, "label": "cat"}
    prompts = with_prompts(tiny, tmp_path, long, good)
    flags = ["--dry-run", "--rollout-max-prompt-len", "32", *prompts]
    result = start(tiny, *flags)
    assert result.exit_code == 0, result.output
    assert (
        f"dropped 1 of 2 prompts, which are too long; the first: {prompts[1]}:1: the prompt has 40 tokens"
        in words(result)
    )
    assert "first prompt (prompts.jsonl:2, " in result.output
    result = start(tiny, *flags, "--overlong-prompts", "error")
    assert result.exit_code == 2 and "jsonl:1: the prompt has 40 tokens, at most 32" in words(
        result
    )


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
    again = [files[0].removesuffix("*0.7"), f"{tmp_path}/prompts.jsonl@[4:6]"]
    result = start(tiny, "--dry-run", "--prompt-data", *again)
    assert result.exit_code == 2 and "prompts.jsonl:5 is read twice" in words(result)


def test_a_reward_must_be_named(tiny, tmp_path):
    path = tmp_path / "no_reward.toml"
    text = (ROOT / "configs/tiny_cpu.toml").read_text()
    path.write_text(text.replace('rm_type = "accepted_words"\n', ""))
    result = start(tiny, "--dry-run", "--config", str(path))
    assert result.exit_code == 2 and "--rm-type is required" in words(result), result.output


def test_max_tokens_per_gpu_must_hold_the_longest_possible_sample(tiny, tmp_path):
    prompts = with_prompts(tiny, tmp_path, {"input": "cat " * 40, "label": "cat"})
    lengths = ["--rollout-max-response-len", "24", *prompts, "--dry-run"]
    assert start(tiny, *lengths, "--max-tokens-per-gpu", "64").exit_code == 0
    result = start(tiny, *lengths, "--max-tokens-per-gpu", "63")
    assert result.exit_code == 2
    assert "max_tokens_per_gpu 63 * context_parallel_size 1 = 63 is below" in words(result)
    assert "40 + rollout_max_response_len 24 = 64 tokens" in words(result)
    both = ["--max-tokens-per-gpu", "32", "--context-parallel-size", "2"]
    assert start(tiny, *lengths, *both).exit_code == 0


@pytest.mark.parametrize(
    "reward, label, message",
    [
        ("accepted_words", 3, "accepted_words needs a label of words, got 3"),
        ("exact_match", ["a"], "exact_match needs a label of text"),
        ("math", {"answer": 3}, "math needs a label of text"),
        (f"{__name__}:picky", "no", "reward tests.unit.launch.test_preflight:picky: no label"),
        (f"{__name__}:of_two_arguments", "a", "found a function (prompt, response_text)"),
    ],
)
def test_a_reward_that_cannot_use_the_labels_is_refused(reward, label, message, tiny, tmp_path):
    good = {"input": "cat", "label": "yes"}
    prompts = with_prompts(tiny, tmp_path, good, {"input": "cat", "label": label})
    result = start(tiny, "--dry-run", "--rm-type", reward, *prompts)
    assert result.exit_code == 2 and message in words(result), result.output
    if "of_two" not in reward:
        assert start(tiny, "--dry-run", "--rm-type", reward, *with_prompts(tiny, tmp_path, good))


def picky(prompt, response_text, response_ids):
    return 0.0


def _yes_alone(prompts):
    for prompt in prompts:
        if prompt.label != "yes":
            raise ValueError(f"no label {prompt.label!r}")


picky.check = _yes_alone


def of_two_arguments(prompt, response_text):
    return 0.0


def test_a_reference_that_is_not_there_or_is_another_model_is_refused(tiny, dense):
    kl = ["--dry-run", "--kl-loss-coef", "0.1", "--ref-load"]
    assert "--ref-load: nowhere: no such checkpoint directory" in words(start(tiny, *kl, "nowhere"))
    result = start(tiny, *kl, str(dense / "model"))
    assert result.exit_code == 2 and "model_type is qwen3, the actor has qwen3_moe" in words(result)
    assert start(tiny, *kl, str(tiny / "model")).exit_code == 0


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


def test_a_teacher_that_is_another_model_or_has_another_vocabulary_is_refused(
    tiny, dense, tmp_path
):
    taught = ["--dry-run", "--use-opd", "--opd-type", "megatron", "--opd-teacher-load"]
    result = start(tiny, *taught, str(dense / "model"))
    assert result.exit_code == 2
    assert "--opd-teacher-load" in words(result) and "model_type is qwen3," in words(result)
    other = with_another_word(tiny / "model", tmp_path / "model")
    result = start(tiny, *taught, str(other))
    assert result.exit_code == 2 and "its tokenizer is another one: 'cat' is token" in words(result)
    assert "(2 differ)" in words(result)
    assert start(tiny, *taught, str(tiny / "model")).exit_code == 0


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
    result = start(tiny, *taught)
    assert result.exit_code == 2
    assert "--opd-teacher-url: does not answer as it should: detokenize: cannot" in words(result)
    short = {"R3TRAIN_TEACHER_API_KEY": "short"}
    assert "variable R3TRAIN_TEACHER_API_KEY: got 5" in words(
        start(tiny, *taught, environment=short)
    )


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


def test_with_a_teacher_a_reward_is_optional(tiny):
    flags = [f"--dry-run", "--rm-type", "none"]
    result = start(tiny, *flags)
    assert result.exit_code == 2 and "--rm-type is required" in words(result)
    taught = ["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(tiny / "model")]
    result = start(tiny, *flags, *taught)
    assert result.exit_code == 0, result.output
    # it would drop every group
    result = start(tiny, *flags, *taught, "--rollout-filter", "zero_variance")
    assert result.exit_code == 2 and "zero_variance drops every group" in words(result)


@pytest.mark.parametrize("flag", ["--run-dir", "--save"])
def test_a_directory_that_cannot_be_made_is_refused(flag, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    more = ["--save-interval", "1"] if flag == "--save" else []
    for place in (tmp_path / "file" / "run", "/proc/nothing"):
        result = start(tiny, "--dry-run", flag, str(place), *more)
        assert result.exit_code == 2 and f"{place}: cannot be made" in words(result)
    assert start(tiny, "--dry-run", flag, str(tmp_path / "a" / "b"), *more).exit_code == 0
    assert not (tmp_path / "a").exists(), "a dry run makes nothing"


def test_places_that_are_written_late_are_tried_before_the_run(tiny, tmp_path):
    for late in ("file", "run/rollouts"):
        (tmp_path / late).parent.mkdir(exist_ok=True)
        (tmp_path / late).write_text("")
    for place in (tmp_path / "file" / "hf", "/proc/nothing"):
        result = start(tiny, "--dry-run", "--save-hf", str(place))
        assert result.exit_code == 2 and f"{place}: cannot be made (save_hf)" in words(result)
    result = start(tiny, "--dry-run", "--dump-rollouts", "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 2 and "rollouts: cannot be made (dump_rollouts)" in words(result)


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


def test_prompts_of_unknown_tokens_alone_are_refused_and_many_are_a_warning(tiny, tmp_path):
    strange, known = {"input": "zzz qqq", "label": "a"}, {"input": "cat", "label": "a"}
    result = start(tiny, "--dry-run", *with_prompts(tiny, tmp_path, strange, strange))
    assert result.exit_code == 2 and "is the tokenizer's unknown token" in words(result)
    result = start(tiny, "--dry-run", *with_prompts(tiny, tmp_path, known, strange))
    assert result.exit_code == 0
    assert "1 of 2 prompts have more than 10% unknown tokens (first prompts.jsonl:2: 100%)" in (
        words(result)
    )


def test_end_tokens_outside_the_vocabulary_are_refused(tiny, tmp_path):
    model = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    content = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(content | {"eos_token_id": 64}))
    result = start(tiny, "--dry-run", "--hf-checkpoint", str(model))
    assert result.exit_code == 2 and "eos_token_id: 64 is not in 0..63" in words(result)


def test_the_check_without_the_switch_is_a_warning_of_the_dry_run_too(tiny):
    off = ["--no-use-rollout-routing-replay", "--enable-r3-correctness-check"]
    result = start(tiny, "--dry-run", *off)
    assert result.exit_code == 0
    assert "warning: --enable-r3-correctness-check has no effect" in words(result)
    assert "warning: mixture of experts without R3" in words(result)
    assert "R3" not in start(tiny, "--dry-run").stderr


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


def test_conversations_that_are_too_long_are_dropped_with_a_warning(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    template = "{% for m in messages %}the {{ m.content }} <eos> {% endfor %}"
    template += "{% if add_generation_prompt %}the {% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    talks = [
        [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "cat " * count}]
        for count in (40, 1)
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    flags = ["--config", str(ROOT / "configs/tiny_sft.toml"), "--prompt-data", str(path)]
    flags += ["--hf-checkpoint", str(tmp_path / "model"), "--dry-run"]
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    result = CliRunner().invoke(train_async.main, flags, env=environment)
    assert result.exit_code == 0, result.output
    assert "warning: " + str(path) + ": dropped 1 of 2 conversations" in words(result)
    estimated = CliRunner().invoke(train_async.main, [*flags, "--estimate"], env=environment)
    lines = estimated.stdout.splitlines()
    assert "# 1 conversations of 6 tokens each" in lines
    assert any(line.startswith("# recipe ") for line in lines)
    assert not any("each server" in line for line in lines)  # nothing is generated
    flags += ["--overlong-prompts", "error"]
    result = CliRunner().invoke(train_async.main, flags, env=environment)
    assert result.exit_code == 2 and "at most 16 fit (rollout_max_response_len)" in words(result)


def saved(directory: Path, number: int = 3, **facts) -> Path:
    """Write what preflight reads of a checkpoint; returns the file of its state."""
    path = directory / f"iter_{number:07d}"
    path.mkdir(parents=True)
    (directory / LATEST).write_text(f"{number}\n")
    state = {"num_rollouts": number, "weight_version": number, "topology": {"world_size": 2}}
    (path / STATE).write_text(json.dumps(state | facts))
    return path / STATE


@pytest.mark.parametrize(
    "pointer",
    ["", "-5", "3.0", "\u0663", "9" * 5000, "4", "../3", "latest", "0003\n4", "\udcff"],
)
def test_a_damaged_pointer_to_a_checkpoint_is_refused_before_ranks_join(pointer, tiny, tmp_path):
    saved(tmp_path)
    (tmp_path / LATEST).write_bytes(pointer.encode("utf-8", "surrogateescape"))
    for flags in (["--load", str(tmp_path)], ["--save", str(tmp_path), "--auto-resume"]):
        result = start(tiny, "--dry-run", *flags)
        assert result.exit_code == 2, result.output
        assert "but there is no whole checkpoint of that name" in words(result)


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"num_rollouts": -5}, "num_rollouts is -5, expected a number from 0 to 9999999"),
        ({"num_rollouts": 4}, "num_rollouts is 4, expected 3, the checkpoint's name"),
        ({"num_rollouts": True}, "num_rollouts is True, expected a number"),
        ({"weight_version": "3"}, "weight_version is '3', expected a number"),
        ({"topology": [2]}, "topology is [2], expected a table of sizes"),
        ({"topology": {"world_size": 1e3}}, "expected a table of sizes"),
        ({"run": "all"}, "run is 'all', expected a table"),
        ({"run": {"lora": 7}}, "its facts of adapters are 7, expected a table"),
        ({"has_buffer": 1}, "has_buffer is 1, expected true or false"),
        ({"run": {}}, "was trained on prompts of another content"),
    ],
)
def test_a_damaged_state_of_a_checkpoint_is_refused_before_ranks_join(
    facts, message, tiny, tmp_path
):
    saved(tmp_path, **facts)
    result = start(tiny, "--dry-run", "--load", str(tmp_path))
    assert result.exit_code == 2 and message in words(result)


ADAPTERS = dict(lora_rank=4, lora_alpha=16.0, target_modules=["all-linear"], exclude_modules=[])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"lora_rank": 8}, "its adapters have lora_rank 8, and the run has 4"),
        ({"lora_alpha": 8.0}, "its adapters have lora_alpha 8.0, and the run has 16.0"),
        ({"target_modules": ["o_proj"]}, "have target_modules ['o_proj'], and the run has"),
        ({"exclude_modules": ["experts"]}, "have exclude_modules ['experts'], and the run has []"),
        ({"base": "0" * 64}, "its adapters belong to another base than --hf-checkpoint"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_before_ranks_join(
    changed, message, tiny, tmp_path
):
    saved(tmp_path, run={"lora": ADAPTERS | {"base": identity(tiny / "model")} | changed})
    result = start(tiny, "--dry-run", "--load", str(tmp_path), "--lora-rank", "4")
    assert result.exit_code == 2 and message in words(result), result.output


@pytest.mark.parametrize(
    "run, rank, message",
    [
        ({}, "4", "holds the whole model, and --lora-rank is 4"),
        ({"lora": ADAPTERS}, "0", "holds LoRA adapters, and --lora-rank is 0"),
    ],
)
def test_a_run_resumes_with_adapters_or_without_as_it_began(run, rank, message, tiny, tmp_path):
    saved(tmp_path, run=run)
    result = start(tiny, "--dry-run", "--load", str(tmp_path), "--lora-rank", rank)
    assert result.exit_code == 2 and message in words(result), result.output


def test_the_dry_run_says_which_adapters_peft_would_drop(tiny, tmp_path):
    saving = ("--dry-run", "--lora-rank", "4", "--save-hf", str(tmp_path / "hf"))
    build(tmp_path / "glm", TinyOptions(family="glm4_moe"))
    said = "--save-hf will be the merged checkpoint only: PEFT drops the adapter of model.layers.0"
    result = start(tmp_path / "glm", *saving)
    assert result.exit_code == 0 and said in words(result), result.output
    assert "PEFT drops" not in words(start(tiny, *saving))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"a": ' + b"9" * 5000]
)
def test_a_state_of_a_checkpoint_that_is_no_table_is_refused(content, tiny, tmp_path):
    saved(tmp_path).write_bytes(content)
    result = start(tiny, "--dry-run", "--load", str(tmp_path))
    assert result.exit_code == 2 and f"{STATE}: " in words(result)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("text", ["two", "-1", "1e9", "9" * 5000, "\u0663"])
def test_a_number_of_torchrun_that_is_none_is_refused(name, text, tiny, monkeypatch):
    monkeypatch.setattr("r3train.config.options.time.sleep", lambda _: None)
    result = start(tiny, "--dry-run", environment={name: text})
    assert result.exit_code == 2, result.output
    assert f"environment variable {name}: {text[:20]!r} is no number of ranks" in words(result)


@pytest.mark.parametrize(
    "place, number, said",
    [
        ("vocabulary", 10**9, "has the id 1000000000"),
        ("vocabulary", 64, "65 tokens, the model has 64"),
        ("added", 10**9, "has the id 1000000000"),
    ],
)
def test_ids_of_a_tokenizer_that_the_model_lacks_are_refused(place, number, said, tiny, tmp_path):
    model = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    if place == "vocabulary":
        content["model"]["vocab"]["lion"] = number
    else:
        content["added_tokens"][-1]["id"] = number
    file.write_text(json.dumps(content))
    result = start(tiny, "--dry-run", "--hf-checkpoint", str(model))
    assert result.exit_code == 2 and said in words(result), result.output


@pytest.mark.parametrize(
    "classes",
    [None, [], "Qwen3MoeForCausalLM", ["Qwen3MoeModel"], ["Qwen3MoeForSequenceClassification"]],
)
def test_a_class_by_which_no_server_finds_the_model_is_refused(classes, tiny, tmp_path):
    """The run ended in SGLang's traceback."""
    model = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    content = json.loads((model / "config.json").read_text())
    assert content.pop("architectures") == ["Qwen3MoeForCausalLM"]
    content |= {} if classes is None else {"architectures": classes}
    (model / "config.json").write_text(json.dumps(content))
    said = f"{model}/config.json: architectures is {json.dumps(classes)}"
    alone = ["eval", str(model), "--eval-prompt-data", "held-out", str(tiny / "prompts.jsonl")]
    alone += ["--dry-run", "--rollout-max-response-len", "8", "--rm-type", "accepted_words"]
    model_flag = ("--dry-run", "--hf-checkpoint", str(model))
    for result in (start(tiny, *model_flag), CliRunner().invoke(main, alone)):
        assert result.exit_code == 2 and said in words(result), result.output
        assert '"architectures": ["Qwen3MoeForCausalLM"]' in words(result)


@pytest.mark.parametrize("name", published_names())
def test_published_models_name_the_class_of_their_servers(name):
    check_class(read_hf_facts(PUBLISHED / name))


def test_a_number_of_experts_that_would_take_all_memory_is_refused(tiny, tmp_path):
    model = Path(shutil.copytree(tiny / "model", tmp_path / "model"))
    content = json.loads((model / "config.json").read_text())
    key = next(key for key in EXPERT_KEYS if key in content)
    content |= {"num_hidden_layers": 512, key: 4095}
    (model / "config.json").write_text(json.dumps(content))
    result = start(tiny, "--dry-run", "--hf-checkpoint", str(model))
    assert result.exit_code == 2
    assert "512 layers of 4095 experts, expected at most 1000000 experts in all" in words(result)


def test_an_export_during_the_run_must_not_replace_the_model_either(tiny, tmp_path):
    (tmp_path / "2").symlink_to(tiny / "model")
    flags = ("--save-hf", str(tmp_path / "{rollout_id}"), "--num-rollout", "5")
    assert start(tiny, "--dry-run", *flags, "--save-interval", "3").exit_code == 0
    refused = start(tiny, "--dry-run", *flags, "--save-interval", "2")
    assert refused.exit_code == 2 and "would replace --hf-checkpoint" in words(refused)


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
    refused = start(tiny, "--sglang-host", "no.such.host.invalid")
    assert refused.exit_code == 2 and "'no.such.host.invalid' is no address of" in words(refused)
    refused = start(tiny, "--dry-run", "--sglang-port", "65536")
    assert refused.exit_code == 2 and "65536 is no port" in words(refused)


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
    config = parse_train_flags([*RECIPE, "--hf-checkpoint", str(tiny / "model")], prog_name="x")
    recorded = []
    log = SimpleNamespace(record_error=recorded.append)
    for name, stub in {
        "r3train.cpu.device.prepare_device": lambda **_: None,
        "r3train.trainer.megatron.topology.init_distributed": lambda *_: None,
        "r3train.trainer.megatron.topology.shutdown": lambda: None,
        "r3train.observe.logging_setup.setup_logging": lambda *_, **__: log,
        "r3train.launch.start.train.open_run_dir": lambda config, run_dir, broadcast: run_dir,
        "r3train.launch.start.train.train": lambda *_: sys.exit(0),
    }.items():
        monkeypatch.setattr(name, stub)
    assert train_program.run(SimpleNamespace(config=config), 0, tmp_path) == 1
    assert [type(error) for error in recorded] == [SystemExit]

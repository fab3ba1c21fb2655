"""A command with a mistake -> the line that says so, the last one on the screen."""

from __future__ import annotations

import json
import re
import shutil
import socket

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from r3train.cli import main
from r3train.config.recipes import recipe_names
from tests.unit.config.test_options import refused
from tests.unit.launch.test_preflight import ROOT, start, words

# words after the required flags -> the end of the line; nothing is read
WORDS = {
    "-num-rollout 3": "-num-rollout: flags begin with two dashes: --num-rollout",
    "-lr 1e-6": "-lr: flags begin with two dashes: --lr",
    "--colocate data.train_files=x": "(data.train_files=x): flags are --name value: --prompt-data x",
    "data.train_batch_size=64": "flags are --name value: --rollout-batch-size 64",
    "algorithm.adv_estimator=grpo": "flags are --name value: --advantage-estimator grpo",
    "actor_rollout_ref.model.path=m": "flags are --name value: --hf-checkpoint m",
    "actor_rollout_ref.rollout.n=8": "flags are --name value: --n-samples-per-prompt 8",
    "rollout.gpu_memory_utilization=0.6": "flags are --name value. Here it is"
    " sglang_mem_fraction_static.",
    "--model m": "No such option '--model'. Here it is hf_checkpoint.",
    "--tp 2": "No such option '--tp'. Here it is tensor_model_parallel_size.",
    "--custom-rm-path path/rw.py:f": "(a file is named as rw:FUNCTION, in the working directory or in"
    " one of PYTHONPATH), got 'path/rw.py:f'",
    "--prompt-data p.jsonl@[0:2": "p.jsonl@[0:2: expected PATH@[START:STOP]*WEIGHT, got"
    " ('p.jsonl@[0:2',)",
    "--update-weight-master-address /eth0": "--update-weight-master-address: expected an address or the"
    " name of a host or network interface, got '/eth0'",
    "--help rolout": "r3train explain rolout looks for a setting",
}


@pytest.mark.parametrize("words", WORDS)
def test_a_wrong_word_is_answered_with_the_right_one(words):
    assert " ".join(refused(*words.split()).split()).endswith(WORDS[words])


# flags of a dry run -> the whole line; FILE is a file of this content, MODEL the checkpoint
REFUSED: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "a part beyond the end": (
        ("--prompt-data", "PROMPTS@[100:200]"),
        None,
        "PROMPTS@[100:200]: holds no prompts: the file has 64 rows",
    ),
    "a pretty array": (
        ("--prompt-data", "FILE"),
        json.dumps([{"input": "cat"}], indent=1),
        "FILE:1: JSON over several lines; expected one object per line",
    ),
    "an array in a line": (
        ("--prompt-data", "FILE"),
        '[{"input": "cat"}]',
        "FILE:1: expected a JSON object per line, got list",
    ),
    "a directory of prompts": (
        ("--prompt-data", "MODEL"),
        None,
        "MODEL: is a directory, expected a file of prompts (prompt_data)",
    ),
    "answers longer than the context": (
        ("--rollout-max-response-len", "4096"),
        None,
        "rollout_max_response_len 4096 leaves no room for a prompt in max_position_embeddings 512 (MODEL)",
    ),
    "a checkpoint of a run as the model": (
        ("--hf-checkpoint", "SAVED"),
        None,
        "SAVED: a checkpoint of --save, expected a Hugging Face one: r3train convert makes it",
    ),
    "a server that splits no heads": (
        ("--sglang-tp-size", "3"),
        None,
        "--sglang-tp-size 3: the 4 attention heads of MODEL do not divide by it",
    ),
    "a server of no ranks": (
        ("--sglang-tp-size", "0"),
        None,
        "--sglang-tp-size 0: expected a number from 1 up",
    ),
    "a share in percent": (
        ("--sglang-mem-fraction-static", "80"),
        None,
        "--sglang-mem-fraction-static 80: expected a share above 0 and below 1",
    ),
    "a dtype that SGLang lacks": (
        ("--sglang-dtype", "fp8"),
        None,
        "--sglang-dtype fp8: expected one of auto, half, float16, bfloat16, float, float32",
    ),
    "a learning rate that cannot be meant": (
        ("--lr", "5"),
        None,
        "lr 5: a step of Adam moves every weight by about lr, expected below 1",
    ),
    "Python's True": (
        ("--config", "FILE"),
        "[run]\nplot = True\n",
        "FILE: not valid TOML: Invalid value (at line 2, column 8): plot = True (texts and paths stand in quotes;"
        " switches are true and false)",
    ),
    "a key that is given twice": (
        ("--config", "FILE"),
        "[trainer]\nlr = 1e-3\nlr = 1e-4\n",
        "FILE: not valid TOML: Cannot overwrite a value (at line 3, column 10): lr = 1e-4 (the key is given twice)",
    ),
    "a path of the shell": (
        ("--hf-checkpoint", "~/model"),
        None,
        "--hf-checkpoint: ~ and $NAME are not expanded here: write the whole path, got '~/model'",
    ),
    "a path of the shell that is written": (
        ("--config", "FILE"),
        '[checkpoint]\nsave = "$HOME/ck"\n',
        "FILE: [checkpoint] save: ~ and $NAME are not expanded here: write the whole path, got '$HOME/ck'",
    ),
    "a misspelt file of prompts": (
        ("--prompt-data", "TINY/prompt.jsonl"),
        None,
        "TINY/prompt.jsonl: no such prompt file (prompt_data); did you mean PROMPTS?",
    ),
    "the directory above the model": (
        ("--hf-checkpoint", "TINY"),
        None,
        "TINY/config.json: there is none; did you mean MODEL? (hf_checkpoint)",
    ),
    "the file of weights as the model": (
        ("--hf-checkpoint", "MODEL/model.safetensors"),
        None,
        "MODEL/model.safetensors: no such checkpoint directory (hf_checkpoint); it is a file: name its directory",
    ),
    "a model without a chat template": (
        ("--apply-chat-template",),
        None,
        "PROMPTS:1: the chat template fails: the checkpoint has none: take an Instruct checkpoint, or put a"
        " chat_template.jinja into its directory",
    ),
    "a misspelt key of an evaluation set": (
        ("--config", "FILE"),
        '[[eval.datasets]]\nname = "a"\npath = "p"\nn_sample = 3\n',
        "FILE: [eval] datasets.0.n_sample: unknown key n_sample. Did you mean n_samples_per_eval_prompt?",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_run_refuses_it_in_one_line(name, tiny, tmp_path):
    flags, content, said = REFUSED[name]
    places = {
        "FILE": tmp_path / "given.jsonl",
        "PROMPTS": tiny / "prompts.jsonl",
        "MODEL": tiny / "model",
        "SAVED": tmp_path / "saved",
        "TINY": tiny,
    }
    places["SAVED"].mkdir()
    (places["SAVED"] / "latest_checkpointed_iteration.txt").write_text("5")
    if content is not None:
        places["FILE"].write_text(content + REQUIRED * ("--config" in flags))

    def placed(text: str) -> str:
        for word, path in places.items():
            text = text.replace(word, str(path))
        return text

    result = start(tiny, *map(placed, flags), "--dry-run")
    assert result.exit_code == 2, result.output
    assert result.output.partition("Error: ")[2].strip() == placed(said)


REQUIRED = """
[rollout]
num_rollout = 1
rollout_batch_size = 2
rollout_max_response_len = 8
"""
# flags -> the last line of the dry run, which goes on
WARNED = {
    "--lr-warmup-iters 1000": "warning: lr_warmup_iters 1,000 is above the run's 60 optimizer steps: the"
    " learning rate ends at 0.06 of lr: lower --lr-warmup-iters",
    "--metadata-key facts": "warning: no prompt has metadata (key facts): name its key with --metadata-key,"
    " or leave the flag out",
    "--rollout-server-env A_VARIABLE": "warning: A_VARIABLE: not in this environment"
    " (--rollout-server-env): set it, or leave the name out",
    "--lr 0.1": "warning: lr 0.1 is high: a step of Adam moves every weight by about lr: usual are 1e-6 for"
    " all weights and 1e-5 to 1e-4 for adapters",
    "--rollout-batch-size 1000": "warning: a rollout of 1,000 prompts (--rollout-batch-size) takes each of"
    " the 64 prompts 15.6 times: lower it, or give more prompts",
    "--num-rollout 5000": "warning: 5,000 rollouts and no checkpoint: what ends the run loses all: add --save"
    " DIRECTORY",
    "--colocate --max-weight-staleness 0": "warning: --colocate sends all weights over a process group to servers"
    " on the same GPUs: --update-weight-transfer-mode shared_memory is faster",
    "--distributed-backend nccl": "warning: --distributed-backend nccl needs CUDA devices, and none is"
    " visible here: take auto, or gloo on a CPU",
    "--attention-backend te": "warning: --attention-backend te needs transformer_engine, which is not"
    " installed here: take auto, or see r3train docs installation",
}


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr("r3train.launch.job.limits.visible_gpus", lambda: 0)
    monkeypatch.setattr("r3train.launch.job.limits.find_spec", lambda name: None)


@pytest.mark.parametrize("flags", WARNED)
def test_a_dry_run_warns_of_it_in_its_last_line(flags, tiny, on_a_cpu):
    result = start(tiny, *flags.split(), "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().splitlines()[-1] == WARNED[flags]
    assert "warning" not in start(tiny, "--dry-run").output


@pytest.mark.parametrize("flags", list(WARNED)[-2:])
def test_a_start_without_the_device_is_refused_before_the_server(
    flags, tiny, tmp_path, on_a_cpu, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = start(tiny, *flags.split(), environment={"LOCAL_RANK": "0"})
    assert result.exit_code == 2, result.output
    assert result.output.rstrip().endswith(WARNED[flags].removeprefix("warning: "))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_cannot_start_is_known_before_anything_starts(
    name, tiny, tmp_path, monkeypatch
):
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = {"wandb": (), "mlflow": ("--mlflow-tracking-uri", address)}[name]
        flags = (f"--use-{name}", *flags)
        refused = start(tiny, *flags, environment={"LOCAL_RANK": "0"})
        assert refused.exit_code == 2, refused.output
        assert refused.output.splitlines()[-1].startswith(f"Error: --use-{name}: ")
        shown = start(tiny, *flags, "--dry-run")
        assert shown.exit_code == 0, shown.output
        assert shown.output.splitlines()[-1].startswith(f"warning: --use-{name}: ")
        assert problems_of_the_doctor(tiny, *flags)[0].startswith(f"machine: --use-{name}: ")


def problems_of_the_doctor(tiny, *flags: str) -> list[str]:
    words = (
        "doctor",
        "--world-size",
        "2",
        "--json",
        "--config",
        str(ROOT / "configs/tiny_cpu.toml"),
    )
    files = ("--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl"))
    result = CliRunner().invoke(main, [*words, *files, *flags])
    found = json.loads(result.output[result.output.index("[\n") :])
    return [f"{each['subject']}: {each['text']}" for each in found if each["level"] == "problem"]


@pytest.mark.parametrize("flags", list(WARNED)[-2:])
def test_the_doctor_names_what_a_start_refuses(flags, tiny, on_a_cpu):
    (problem,) = problems_of_the_doctor(tiny, *flags.split())
    assert f"warning: {problem.removeprefix('machine: ')}" in WARNED[flags]


def test_a_start_that_the_hosts_memory_cannot_hold_is_refused(tiny):
    ranks = {"LOCAL_WORLD_SIZE": "900000"}
    said = r"the host has [\d.]+ GiB of memory free, about [\d.]+ TiB needed: fewer ranks"
    refused = start(tiny, environment=ranks | {"LOCAL_RANK": "0"})
    assert refused.exit_code == 2 and re.search(f"Error: {said}", words(refused)), refused.output
    shown = start(tiny, "--dry-run", environment=ranks)
    assert shown.exit_code == 0 and re.search(f"warning: {said}", words(shown)), shown.output


@pytest.mark.parametrize(
    "words, said",
    [
        ("trian --config tiny_cpu", "No such command 'trian'. Did you mean train?"),
        (
            "convert MODEL out",
            "MODEL: a model (it has a config.json), expected a checkpoint of --save",
        ),
        (
            "--config tiny_cpu train",
            "No such option '--config'. Flags stand behind the command: r3train train --config ...",
        ),
        (
            "estimate Qwen/Qwen3-30B-A3B",
            "(r3train recipes lists them); r3train downloads nothing: hf download Qwen/Qwen3-30B-A3B --local-dir"
            " models/Qwen3-30B-A3B.",
        ),
    ],
)
def test_a_wrong_command_is_refused(words, said, tiny):
    model = str(tiny / "model")
    result = CliRunner().invoke(main, words.replace("MODEL", model).split())
    assert result.exit_code == 2
    assert result.output.rstrip().endswith(said.replace("MODEL", model))


def test_a_bfloat16_checkpoint_that_trains_in_float32_is_a_warning(tiny, tmp_path):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(narrow, model / "model.safetensors", metadata={"format": "pt"})
    flags, said = ("--hf-checkpoint", str(model), "--dry-run"), "and will train in float32"
    assert said in start(tiny, *flags).output.splitlines()[-1]
    assert said not in start(tiny, *flags, "--bf16").output


def test_a_reward_of_ones_own_says_which_named_one_it_replaces(tiny):
    shown = start(
        tiny, "--custom-rm-path", "tests.unit.reward_functions:number", "--dry-run"
    ).output
    said = "reward_functions:number scores the answers, and rm_type accepted_words does not"
    assert said in words_of_warnings(shown)


def words_of_warnings(output: str) -> str:
    return " ".join(line for line in output.splitlines() if line.startswith("warning: "))


def test_a_configuration_of_windows_is_read(tiny, tmp_path):
    recipe = (ROOT / "configs/tiny_cpu.toml").read_bytes()
    (tmp_path / "notepad.toml").write_bytes(b"\xef\xbb\xbf" + recipe.replace(b"\n", b"\r\n"))
    result = start(tiny, "--config", str(tmp_path / "notepad.toml"), "--dry-run")
    assert result.exit_code == 0, result.output


def test_a_pointer_of_git_lfs_is_named(tiny, tmp_path):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    result = start(tiny, "--hf-checkpoint", str(model), "--dry-run")
    assert result.exit_code == 2
    assert result.output.rstrip().endswith("safetensors file, a pointer of git-lfs: git lfs pull")


def test_each_recipe_says_what_it_is_for():
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["recipes"]).output
    assert all(len(line) <= 80 for line in shown.splitlines())
    for name in recipe_names():
        assert re.search(rf"^{name} +\S+ .*\w", shown, re.MULTILINE), name


@pytest.mark.parametrize("flags, counted", [((), 2), (("--world-size", "4"), 4)])
def test_the_doctor_counts_the_ranks_that_a_recipe_needs(flags, counted, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "r3train.doctor.doctor_command.diagnose",
        lambda config, world_size, *_args, **_kwargs: seen.append(world_size) or [],
    )
    result = CliRunner(env={"WORLD_SIZE": None}).invoke(
        main, ["doctor", *flags, "--config", "tiny_cpu"]
    )
    assert result.exit_code == 0 and seen == [counted], result.output

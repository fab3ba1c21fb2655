"""The r3train command and its tiny model."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.verify import tiny
from r3train.cli import main
from r3train.families.read_facts import read_hf_facts
from r3train.data import load_tokenizer
from r3train.rewards.accepted_words import accepted_words
from tests.all_prompts import all_prompts


ROOT = Path(__file__).resolve().parents[3]


def make(output: Path, *args: str):
    return CliRunner().invoke(main, ["make-tiny-model", "--output", str(output), *args])


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("tiny") / "here"
    result = make(output)
    assert result.exit_code == 0 and "written" in result.output, result.output
    return output


_WITHOUT_TORCH = """
import ctypes
import sys
from importlib import import_module
from r3train.cli import SUBCOMMANDS, main as tools
from train_async import main

def check(what):
    taken = {"torch", "megatron", "sglang"} & sys.modules.keys()
    assert not taken, f"{what} has imported {taken}"

tools(["--help"], standalone_mode=False)
main(["--help"], standalone_mode=False)
check("--help")
for path, _ in SUBCOMMANDS.values():
    import_module(path.partition(":")[0])
    check(f"--help of {path}")
try:
    ctypes.CDLL("libcuda.so.1")  # where a driver is, a dry run asks torch for the GPUs
except OSError:
    main(sys.argv[1:], standalone_mode=False)
    check("the dry run")
"""


def test_no_help_and_no_dry_run_imports_torch(model):
    flags = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--dry-run", "--world-size", "2"]
    flags += ["--hf-checkpoint", str(model / "model")]
    flags += ["--prompt-data", str(model / "prompts.jsonl"), "--use-rollout-routing-replay"]
    subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *flags],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def test_help_names_every_subcommand_and_each_one_is_there():
    output = CliRunner().invoke(main, ["--help"]).output
    from r3train.cli import SUBCOMMANDS

    for name in SUBCOMMANDS:
        assert name in output
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_an_unknown_subcommand_ends_with_code_2():
    assert CliRunner().invoke(main, ["make-huge-model"]).exit_code == 2


def test_a_tiny_model_of_a_dense_family_takes_no_number_of_experts(tmp_path):
    refused = make(tmp_path / "refused", "--family", "llama", "--num-experts", "8")
    assert refused.exit_code == 2 and "--num-experts 8: llama has none" in refused.output
    assert make(tmp_path / "tiny", "--family", "llama").exit_code == 0
    assert not read_hf_facts(tmp_path / "tiny/model").is_moe


def test_the_tiny_model_is_a_moe_checkpoint_with_per_expert_names(model):
    from safetensors import safe_open

    facts = read_hf_facts(model / "model")
    assert facts.moe_layer_numbers == (1, 2, 3, 4) and facts.vocab_size % 8 == 0
    with safe_open(model / "model" / "model.safetensors", "np") as tensors:
        names = set(tensors.keys())
        assert {str(tensors.get_tensor(name).dtype) for name in names} == {"float32"}
    for layer in range(4):
        for expert in range(8):
            for part in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" in names


def test_every_word_of_the_task_is_one_token_of_its_own(model):
    tokenizer = load_tokenizer(model / "model")
    words = tiny.task_words()
    ids = tokenizer.encode(" ".join(words))
    assert len(ids) == len(set(ids)) == len(words)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == " ".join(words)
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0


def test_the_task_has_distinct_prompts_for_four_categories_without_shared_words(model):
    limit = (16, "16")
    tokenizer = load_tokenizer(model / "model")
    prompts = all_prompts(model / "prompts.jsonl", tokenizer, limit=limit, overlong_prompts="error")
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 32
    labels = {tuple(prompt.label) for prompt in prompts}
    assert len(labels) == 4
    assert len(set().union(*labels)) == sum(map(len, labels)) == 48


def test_chance_leaves_room_to_learn(model):
    """Random words earn a fifth of the reward; the right words earn all of it."""
    import random

    tokenizer = load_tokenizer(model / "model")
    prompts = all_prompts(model / "prompts.jsonl", tokenizer)
    generator = random.Random(0)
    vocabulary = list(range(len(tokenizer)))
    scores = [
        accepted_words(prompt, tokenizer.decode(generator.choices(vocabulary, k=8)))
        for prompt in prompts
        for _ in range(20)
    ]
    assert 0.1 < sum(scores) / len(scores) < 0.3
    assert accepted_words(prompts[0], " ".join(prompts[0].label[:8])) == 1.0


def test_the_same_options_again_are_reused_and_change_nothing(model):
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    result = make(model)
    assert result.exit_code == 0 and "already there" in result.output
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(model, tmp_path):
    make(tmp_path / "same")
    make(tmp_path / "other", "--seed", "1")
    assert digests(tmp_path / "same") == digests(model)
    weights = "model/model.safetensors"
    assert digests(tmp_path / "other")[weights] != digests(model)[weights]


def test_other_options_are_refused_and_replaced_with_force(tmp_path):
    output = tmp_path / "tiny"
    assert make(output, "--num-layers", "1").exit_code == 0
    result = make(output, "--num-layers", "2")
    assert result.exit_code == 2 and "num_layers 1 instead of 2" in result.output
    assert make(output, "--num-layers", "2", "--force").exit_code == 0
    assert read_hf_facts(output / "model").num_hidden_layers == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_somebody_elses_directory_is_never_replaced(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    for extra in ([], ["--force"]):
        result = make(tmp_path, *extra)
        assert result.exit_code == 2 and "holds no tiny model" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_save_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.build(tmp_path / "tiny", tiny.TinyOptions(num_layers=1))
    assert list(tmp_path.iterdir()) == []


def test_make_demo_gives_a_family_to_its_model_and_the_model_to_the_run():
    def asked(*variables: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", "demo", *variables]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "--family qwen3_moe --output runs/tiny\n" in asked()
    assert "--hf-checkpoint" not in asked()  # the recipe's
    of_family = asked("FAMILY=moonlight")
    assert "--family moonlight --output runs/tiny-moonlight\n" in of_family
    assert "--hf-checkpoint runs/tiny-moonlight/model" in of_family
    assert "--prompt-data runs/tiny-moonlight/prompts.jsonl" in of_family


def test_a_variant_has_the_shape_that_was_asked_for(tmp_path):
    args = "--num-layers 3 --num-experts 4 --topk 3 --vocab-size 128 --dtype bfloat16".split()
    assert make(tmp_path / "v", *args).exit_code == 0
    facts = read_hf_facts(tmp_path / "v" / "model")
    assert (facts.num_hidden_layers, facts.num_experts, facts.num_experts_per_tok) == (3, 4, 3)
    assert facts.vocab_size == 128
    config = json.loads((tmp_path / "v" / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert make(tmp_path / "dense", "--num-experts", "0").exit_code == 0
    assert not read_hf_facts(tmp_path / "dense" / "model").is_moe


@pytest.mark.parametrize(
    "args, message",
    [
        (["--vocab-size", "32"], "vocab_size 32 is below"),
        (["--topk", "9"], "topk 9 is not in 1..8"),
        (["--num-kv-heads", "3"], "num_heads 4 does not divide by num_kv_heads 3"),
    ],
)
def test_an_impossible_shape_is_refused(tmp_path, args, message):
    result = make(tmp_path / "x", *args)
    assert result.exit_code == 2 and message in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_was_removed_is_refused_with_what_to_use_instead():
    table = files("r3train.config").joinpath("removed.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(table)["commands"]
    for words, instead in rows.items():
        result = CliRunner().invoke(main, words.split())
        assert result.exit_code == 2 and instead in result.output, (words, result.output)

"""The toy of the first day on GPUs: shapes that kernels are made for, and a recipe that takes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import train_async
from r3train.verify import tiny
from r3train.cli import main
from r3train.families.read_facts import read_hf_facts
from r3train.families import TINY_MODELS
from r3train.families.tiny_options import SIZES, TinyOptions

ROOT = Path(__file__).resolve().parents[3]


def asked(monkeypatch, *flags: str) -> TinyOptions:
    """The options that the command would build."""
    found = []
    monkeypatch.setattr(tiny, "build", lambda output, options, **_: found.append(options))
    result = CliRunner().invoke(main, ["make-tiny-model", "--output", "x", *flags])
    assert result.exit_code == 0, result.output
    return found[0]


def test_its_sizes_are_those_of_kernels_and_flags_that_are_given_win(monkeypatch):
    toy = replace(TinyOptions(), **SIZES["gpu"])
    assert asked(monkeypatch, "--size", "gpu") == toy
    assert toy.num_heads * toy.head_dim == toy.hidden_size == 512 and toy.head_dim == 128
    assert (toy.num_experts, toy.topk, toy.moe_intermediate_size) == (64, 8, 128)
    given = ("--size", "gpu", "--head-dim", "64", "--dtype", "float32", "--vocab-size", "512")
    found = asked(monkeypatch, *given)
    assert found == replace(toy, head_dim=64, dtype="float32", vocab_size=512)
    # a flag may give what is the demo's default
    assert asked(monkeypatch, "--size", "gpu", "--topk", "2") == replace(toy, topk=2)
    assert asked(monkeypatch) == asked(monkeypatch, "--size", "tiny") == TinyOptions()


def test_a_trained_tokenizer_has_its_own_number_of_tokens(monkeypatch, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"input": "a"}\n')
    flags = ("--size", "gpu", "--tokenizer-from", str(tmp_path / "texts.jsonl"))
    assert asked(monkeypatch, *flags).vocab_size == tiny.TRAINED_VOCAB_SIZE


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_latent_attention_has_heads_as_published_models_have_them(family):
    sizes = TINY_MODELS[family].sizes(replace(TinyOptions(family=family), **SIZES["gpu"]))
    heads = [sizes[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v")]
    assert heads == [128, 64, 128]


def test_the_recipe_takes_it_and_it_is_small(tmp_path):
    output = tmp_path / "toy"
    made = ["make-tiny-model", "--size", "gpu", "--output", str(output)]
    result = CliRunner().invoke(main, made)
    assert result.exit_code == 0, result.output
    hf = read_hf_facts(output / "model")
    assert (hf.num_hidden_layers, hf.num_experts, hf.num_experts_per_tok) == (4, 64, 8)
    assert (output / "model/model.safetensors").stat().st_size < 120e6
    assert json.loads((output / "model/config.json").read_text())["head_dim"] == 128
    flags = ["--config", str(ROOT / "configs/tiny_gpu.toml"), "--dry-run", "--world-size", "1"]
    flags += ["--hf-checkpoint", str(output / "model"), "--run-dir", str(tmp_path / "run")]
    flags += ["--prompt-data", str(output / "prompts.jsonl")]
    none = {"RANK": None, "WORLD_SIZE": None}
    result = CliRunner().invoke(train_async.main, flags, env=none)
    assert result.exit_code == 0, result.output

"""Families that nobody verified, and checkpoints that hold more or less than the actor trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.unit.launch.test_preflight import start


@pytest.fixture
def own(tiny, tmp_path) -> Path:
    """A copy of the demo's model and prompts, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


def refused(directory: Path) -> str:
    """Return the words of the dry run, which must refuse the checkpoint."""
    result = start(directory, "--dry-run")
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def change(directory: Path, **keys) -> None:
    file = directory / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize("family", ["deepseek_v3", "olmoe", "llama"])
def test_a_family_that_nobody_verified_is_refused_by_name_with_those_that_work(family, own):
    change(own, model_type=family)
    said = refused(own)
    assert f"model_type '{family}' was not verified" in said
    assert "verified: glm4_moe, mixtral, qwen2_moe, qwen3, qwen3_moe" in said


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling has rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters has rope_type 'llama3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ],
)
def test_a_setting_that_makes_it_another_model_is_refused(keys, message, own):
    change(own, **keys)
    assert message in refused(own)


def test_a_tensor_that_would_be_neither_loaded_nor_exported_is_refused(own):
    file = own / "model" / "model.safetensors"
    weights = load_file(file)
    gate = "model.layers.1.mlp.shared_expert_gate.weight"
    save_file(weights | {gate: weights["model.norm.weight"]}, file)
    assert f"{gate}: would be neither loaded nor exported" in refused(own)


def test_a_tensor_that_is_missing_is_refused(own):
    file = own / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.3.mlp.experts.7.up_proj.weight"]
    save_file(weights, file)
    assert "model.layers.3.mlp.experts.7.up_proj.weight: missing" in refused(own)


def test_layers_of_token_prediction_and_rotary_frequencies_may_be_there(own):
    file = own / "model" / "model.safetensors"
    weights = load_file(file)
    extra = ("model.layers.4.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    save_file(weights | {name: weights["model.norm.weight"] for name in extra}, file)
    result = start(own, "--dry-run")
    assert result.exit_code == 0, result.output

"""Tensors of a checkpoint, read one by one, and found by the names of parameters."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from r3train.families.read_facts import read_hf_facts
from r3train.families import weights_of
from r3train.trainer.megatron.hf_weights import CheckpointTensors, _whole
from r3train.trainer.megatron.weight_layout import TensorNames
from tests.published import write_config

EXPERT = "mlp.experts.{}linear_fc1.weight{}"


def test_a_row_of_a_tensor_of_all_experts_is_read_alone(tmp_path):
    experts = torch.arange(24.0).view(3, 4, 2)
    save_file({"gate_up": experts}, tmp_path / "model.safetensors")
    tensors = CheckpointTensors(tmp_path)
    assert torch.equal(tensors.read("gate_up"), experts)
    assert torch.equal(tensors.read("gate_up", 2), experts[2])


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    save_file({"norm": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path}: lm_head.weight is missing"):
        CheckpointTensors(tmp_path).read("lm_head.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(bad, dtype, tmp_path):
    experts = torch.full((3, 4, 2), torch.finfo(dtype).max / 1e3, dtype=dtype)
    experts[1, 2, 0] = bad
    save_file({"gate_up": experts}, tmp_path / "model.safetensors")
    tensors = CheckpointTensors(tmp_path)
    assert torch.equal(tensors.read("gate_up", 0), experts[0])
    for expert in (None, 1):
        with pytest.raises(ValueError, match=f"{tmp_path}: gate_up holds NaN or infinite numbers"):
            tensors.read("gate_up", expert)


def test_files_are_opened_at_the_first_read(tmp_path):
    tensors = CheckpointTensors(tmp_path / "not there")  # of a rank that receives all
    with pytest.raises(ValueError, match="no \\*.safetensors file"):
        tensors.read("norm")


def test_a_tensor_of_another_shape_than_config_json_has_it_is_named(tmp_path):
    write_config(tmp_path / "model", "Qwen3-30B-A3B")
    names = TensorNames(weights_of(read_hf_facts(tmp_path / "model")), [0])
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model/model.safetensors")
    tensors, found = CheckpointTensors(tmp_path / "model"), "decoder.final_layernorm.weight"
    with pytest.raises(
        ValueError, match=r"model.norm.weight has the shape \[2\], expected \[2048\]"
    ):
        _whole(tensors, names.find(found))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("mlp.router.weight", "mlp.gate.weight"),
        (EXPERT.format("local_experts.3.", ""), "mlp.experts.35.gate_proj.weight"),
        (EXPERT.format("", "3"), "mlp.experts.35.gate_proj.weight"),
    ],
)
def test_both_layer_specs_lead_to_the_same_tensors(name, expected, tmp_path):
    write_config(tmp_path / "model", "Qwen3-30B-A3B")
    names = TensorNames(weights_of(read_hf_facts(tmp_path / "model")), [7, 8], first_expert=32)
    hf = names.find(f"decoder.layers.1.{name}")
    assert hf.names[0] == f"model.layers.8.{expected}"


def test_buffers_of_megatron_and_adapters_have_no_tensors(tmp_path):
    write_config(tmp_path / "model", "Qwen3-30B-A3B")
    names = TensorNames(weights_of(read_hf_facts(tmp_path / "model")), [0])
    assert names.find("decoder.layers.0.mlp.router.local_tokens_per_expert") is None
    assert names.find("rotary_pos_emb.inv_freq") is None
    # all layers have experts here
    assert names.find("decoder.layers.0.mlp.linear_fc1.weight") is None

"""Weights in blocks of fp8: the numbers, the names, the checkpoint that servers start from."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from r3train.families.read_facts import read_hf_facts
from r3train.families import FAMILIES, FP8_SCALE, quantised_tensors, tensor_shapes
from r3train.families.tiny_options import TinyOptions
from r3train.fp8_blocks import as_servers_store, dequantised, quantised, rounded_activations
from r3train.hf_checkpoint import WeightIndex, kind_of, read_headers, write_fp8_checkpoint
from r3train.verify.tiny import build

SHAPES = [(128, 128), (256, 384), (1, 1), (130, 127), (576, 256), (64, 1024)]
SERVED = [name for name, family in FAMILIES.items() if family.fp8_served]


def weight(shape, seed=0, dtype=torch.bfloat16) -> torch.Tensor:
    """Numbers over many orders of magnitude, with blocks of zeros."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=random) * 10 ** torch.randn(shape, generator=random)
    numbers[:128, 128:256] = 0
    return numbers.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_bit_by_bit_those_that_SGLang_reads_from_them(shape, dtype):
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    values, scales = quantised(weight(shape, dtype=dtype))
    for out in (torch.float32, torch.bfloat16):
        theirs = block_quant_dequant(values, scales, [128, 128], dtype=out)
        assert torch.equal(dequantised(values, scales).to(out), theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_off_by_half_a_step_of_fp8_at_most(shape):
    exact = weight(shape).double()
    values, scales = quantised(exact.bfloat16())
    steps = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    steps = steps[: shape[0], : shape[1]]
    # three bits of mantissa; below 2**-6 of a scale equal steps of 2**-9
    allowed = torch.maximum(exact.abs() / 16, steps / 2**10) * (1 + 1e-6)
    assert ((dequantised(values, scales).double() - exact).abs() <= allowed).all()
    assert scales.min() > 0 and values.float().abs().max() == 448


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_once_more_nothing_changes(shape):
    values, scales = quantised(weight(shape))
    again, scales_again = quantised(dequantised(values, scales))
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales_again, scales)


def test_activations_have_a_scale_for_each_128_numbers_of_a_token():
    x = weight((3, 256), seed=1)
    rows = [quantised(part) for token in x for part in token.view(-1, 1, 128)]
    expected = torch.cat([dequantised(*pair) for pair in rows]).view(3, 256)
    assert torch.equal(rounded_activations(x), expected)


@pytest.fixture(scope="module", params=SERVED)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    options = TinyOptions(
        family=request.param, num_layers=2, hidden_size=128, head_dim=64, moe_intermediate_size=128
    )
    build(directory / "tiny", options)
    return read_hf_facts(directory / "tiny" / "model")


# of the matrices of a layer, what the fp8 releases of these families leave as it is, and kv_b_proj
WHOLE = re.compile(r"embed_tokens|lm_head|\.(shared_expert_)?gate\.weight|kv_b_proj")


def test_all_matrices_are_quantised_but_routers_embedding_and_output_layer(checkpoint):
    matrices = {name for name, shape in tensor_shapes(checkpoint).items() if len(shape) == 2}
    assert quantised_tensors(checkpoint) == {n for n in matrices if not WHOLE.search(n)}


def test_a_server_starts_from_the_checkpoints_own_numbers(checkpoint, tmp_path):
    directory = tmp_path / "served"
    write_fp8_checkpoint(checkpoint, directory)
    write_fp8_checkpoint(checkpoint, directory)  # of an earlier start
    original = load_file(checkpoint.path / "model.safetensors")
    names = quantised_tensors(checkpoint)
    (file,) = directory.glob("*.safetensors")
    served = load_file(file)
    assert served.keys() == original.keys() | {name + FP8_SCALE for name in names}
    for name, tensor in original.items():
        if name not in names:
            assert torch.equal(served[name], tensor)
            continue
        values, scales = quantised(tensor)
        assert torch.equal(served[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(served[name + FP8_SCALE], scales)
    config = json.loads((directory / "config.json").read_text())
    told = config.pop("quantization_config")
    assert config == json.loads((checkpoint.path / "config.json").read_text())
    assert told["weight_block_size"] == [128, 128] and told["quant_method"] == "fp8"
    assert (directory / "tokenizer.json").is_file()


def test_a_checkpoint_that_cannot_be_written_is_one_line_and_leaves_nothing(checkpoint, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match="^[^\\n]*run/served: the servers' checkpoint cannot be"):
        write_fp8_checkpoint(checkpoint, tmp_path / "run" / "served")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("fault", ["", "scale left out", "not quantised", "scale of another shape"])
def test_an_update_brings_every_tensor_in_the_form_of_the_servers(checkpoint, fault):
    names = quantised_tensors(checkpoint)
    name = min(names)
    tensors = dict(load_file(checkpoint.path / "model.safetensors"))
    tensors = {n: t.bfloat16() if t.ndim > 1 else t for n, t in tensors.items()}
    sent = {n: kind_of(t) for n, t in as_servers_store(tensors.items(), names)}
    if fault == "scale left out":
        del sent[name + FP8_SCALE]
    elif fault == "not quantised":
        sent[name] = kind_of(tensors[name])
    elif fault:
        sent[name + FP8_SCALE] = kind_of(torch.ones(7, 7))
    index = WeightIndex(checkpoint, "bfloat16", quantised=names)
    num_bytes = sum(kind.num_bytes for kind in sent.values())
    if not fault:
        return index.require(sent, num_bytes, version=1)
    with pytest.raises(ValueError, match=re.escape(name)):
        index.require(sent, num_bytes, version=1)

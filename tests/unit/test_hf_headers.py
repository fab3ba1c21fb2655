"""Headers of checkpoints: the files of an index, damaged ones, digests, and all that an export takes along."""

from __future__ import annotations

import json
import os
import struct
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.hf_checkpoint import (
    MARKER,
    TensorKind,
    check_export_directory,
    copy_all_but_weights,
    export_checkpoint,
    export_checksums,
    identity,
    is_trained,
    read_header,
    read_headers,
    replaced_directory,
    weight_files,
    write_shards,
)

INDEX = "model.safetensors.index.json"


def written(directory, tensors, file="model.safetensors", config="{}"):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    save_file(tensors, directory / file)
    return directory


def test_an_index_names_the_files_and_others_are_not_read(tmp_path):
    for name in ("b", "a", "old"):
        written(tmp_path, {name: torch.ones(1)}, f"{name}.safetensors")
    assert [file.name[0] for file in weight_files(tmp_path)] == ["a", "b", "o"]
    weights = {"b": "b.safetensors", "a": "a.safetensors", "a2": "a.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    assert read_headers(tmp_path).keys() == {"a", "b"}
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a.safetensors is missing \(1 of 2\)"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "[" * 100_000]
)
def test_a_damaged_index_is_one_line_with_its_path(tmp_path, content):
    written(tmp_path, {"a": torch.ones(1)})
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path / INDEX}: not an index of weights: "):
        weight_files(tmp_path)


def test_an_index_that_is_a_link_to_nowhere_is_an_incomplete_download(tmp_path):
    written(tmp_path, {"a": torch.ones(1)})
    os.symlink(tmp_path / "blob", tmp_path / INDEX)
    with pytest.raises(ValueError, match=f"{tmp_path / INDEX}: cannot be read: No such file"):
        weight_files(tmp_path)


def test_a_directory_without_weights_and_a_cut_or_absent_file_are_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path}: no \*.safetensors file"):
        weight_files(tmp_path)
    file = written(tmp_path, {"a": torch.ones(9)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file}: not a whole safetensors file, cut"):
        read_header(file)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file}: cannot be read: No such file"):
        read_header(file)


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"w": 3}',
        json.dumps({"w": {**ENTRY, "data_offsets": None}}).encode(),
        json.dumps({"w": {**ENTRY, "data_offsets": [24, 0]}}).encode(),
        json.dumps({"w": {**ENTRY, "data_offsets": [0, 48]}}).encode(),
        json.dumps({"w": {**ENTRY, "shape": [2, -3]}}).encode(),
        b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"{\xff}",
    ],
)
def test_a_damaged_header_names_its_file(header, tmp_path):
    file = tmp_path / "model.safetensors"

    def write(header: bytes) -> None:
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))

    write(json.dumps({"w": ENTRY}).encode())
    assert read_header(file)["w"].num_elements == 6
    write(header)
    with pytest.raises(ValueError, match="model.safetensors: not a whole"):
        read_header(file)


def test_a_header_has_shapes_and_dtypes_as_torch_names_them(tmp_path):
    dtypes = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    dtypes += ("uint8", "int8", "int16", "int32", "int64", "bool")
    tensors = {name: torch.zeros(2, 3).to(getattr(torch, name)) for name in dtypes}
    found = read_header(written(tmp_path, tensors) / "model.safetensors")
    assert found == {name: TensorKind((2, 3), name) for name in dtypes}
    for name, kind in found.items():
        assert (kind.num_elements, kind.num_bytes) == (6, tensors[name].nbytes)
    assert str(found["bfloat16"]) == "bfloat16 [2, 3]"


def test_a_digest_is_of_names_kinds_and_first_rows_and_not_of_shards(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2), "c": torch.ones(2)}
    base = identity(written(tmp_path / "base", tensors))
    (tmp_path / "two").mkdir()
    write_shards(reversed(tensors.items()), tmp_path / "two", shard_bytes=8)
    (tmp_path / "two" / "config.json").write_text("{}")
    assert len(weight_files(tmp_path / "two")) == 3
    assert identity(tmp_path / "two") == base
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    moved["a"][0, 2] += 1
    others = {
        "moved": written(tmp_path / "moved", moved),
        "config": written(tmp_path / "config", tensors, config='{"x": 1}'),
        "renamed": written(tmp_path / "renamed", {"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]}),
        "longer": written(tmp_path / "longer", tensors | {"a": torch.arange(9.0).reshape(3, 3)}),
        "dtype": written(tmp_path / "dtype", tensors | {"c": torch.ones(2).view(torch.int32)}),
    }  # fmt: skip
    digests = {name: identity(directory) for name, directory in others.items()}
    assert base not in digests.values() and len(set(digests.values())) == len(digests)


@pytest.mark.parametrize(
    "name, tied, trained",
    [
        ("model.layers.3.mlp.gate.weight", False, True),
        ("model.layers.4.mlp.gate.weight", False, False),
        ("model.layers.10.mlp.gate.weight", False, False),
        ("lm_head.weight", False, True),
        ("lm_head.weight", True, False),
        ("model.embed_tokens.weight", True, True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False, False),
        ("mtp.fc.weight", False, False),
        ("model.mtp.fc.weight", False, True),
        ("model.visual.blocks.0.norm1.weight", False, False),
    ],
)
def test_what_no_actor_trains_is_left_out(name, tied, trained):
    facts = SimpleNamespace(num_hidden_layers=4, tie_word_embeddings=tied)
    assert is_trained(name, facts) is trained


def test_files_of_the_configuration_come_along_and_weights_and_folders_do_not(tmp_path):
    base, target = tmp_path / "base", tmp_path / "target"
    (base / "original").mkdir(parents=True), target.mkdir()
    kept = {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "README.md"}
    weights = {f"w{end}" for end in (".safetensors", ".bin", ".pt", ".pth", ".gguf")}
    for name in kept | weights | {INDEX, "pytorch_model.bin.index.json"}:
        (base / name).write_text(name)
    copy_all_but_weights(base, target)
    assert {path.name for path in target.iterdir()} == kept
    assert all((target / name).read_text() == name for name in kept)


def test_what_a_killed_export_left_is_in_nobodys_way(tmp_path):
    directory = tmp_path / "hf"
    for name in ("hf", ".hf.partial", ".hf.earlier"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale").write_text(name)
    with replaced_directory(directory) as partial:
        assert not list(partial.iterdir()) and (directory / "stale").exists()
        (partial / "new").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert [path.name for path in directory.iterdir()] == ["new"]


def test_a_directory_that_is_absent_empty_or_an_export_may_be_replaced(tmp_path):
    base = written(tmp_path / "base", {"a": torch.ones(1)})
    directory = tmp_path / "hf"
    check_export_directory(directory, base)
    directory.mkdir()
    check_export_directory(directory, base)
    (directory / MARKER).write_text("{}")
    (directory / "weights").write_text("earlier")
    check_export_directory(directory, base)
    assert export_checksums(directory) is None and export_checksums(base) is None
    (directory / MARKER).write_text('{"files": 3}')
    with pytest.raises(ValueError, match=MARKER):
        export_checksums(directory)


def test_a_buffer_that_is_filled_again_for_each_tensor_is_written_as_it_was(tmp_path):
    buffer = torch.zeros(2)
    named = ((f"w{i}", buffer.fill_(i)) for i in range(3))
    assert write_shards(named, tmp_path, shard_bytes=1 << 20) == (3, 24, 1)
    (file,) = weight_files(tmp_path)
    assert {name: t.tolist() for name, t in load_file(file).items()} == {
        f"w{i}": [i, i] for i in range(3)
    }


def test_an_export_has_fused_experts_where_its_model_has_and_says_its_size(tmp_path):
    fused = [("model.layers.0.mlp.experts.down_proj", torch.ones(2))]
    for model_type, allowed in (("gpt_oss", True), ("qwen3_moe", False)):
        base, directory = tmp_path / model_type, tmp_path / f"{model_type}.hf"
        base.mkdir()
        (base / "config.json").write_text(json.dumps({"model_type": model_type}))
        if not allowed:
            with pytest.raises(ValueError, match="fused expert tensor"):
                export_checkpoint(fused, directory, hf_checkpoint=base)
            continue
        assert export_checkpoint(fused, directory, hf_checkpoint=base) == (1, 8)
        marker = json.loads((directory / MARKER).read_text())
        assert (marker["num_tensors"], marker["num_bytes"]) == (1, 8)

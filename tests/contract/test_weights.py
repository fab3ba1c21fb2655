"""Weights of Megatron's ranks, compared with records of them (``record_weights.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torch

from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.families import FAMILIES, tensor_shapes, weights_of
from r3train.families.weights import ModelWeights, Weight
from r3train.hf_checkpoint import is_trained
from r3train.trainer.megatron.weight_layout import TensorNames, HfTensors
from tests.contract.record_weights import (
    TOPOLOGIES,
    WEIGHTS,
    checksum,
    configs,
    fields,
    pattern,
)

RECORDS = sorted(file.stem for file in WEIGHTS.glob("*.json") if file.stem != "fields")


def recorded(name: str, directory: Path) -> tuple[dict[str, Any], HfModelFacts]:
    """Return a record, and the facts of its checkpoint, of which the directory gets the config.json."""
    content = json.loads((WEIGHTS / f"{name}.json").read_text())
    (directory / "config.json").write_text(json.dumps(content["config"]))
    return content, read_hf_facts(directory)


def test_there_is_a_record_of_every_family():
    configs = (json.loads((WEIGHTS / f"{name}.json").read_text())["config"] for name in RECORDS)
    assert {config["model_type"] for config in configs} == FAMILIES.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_the_tensors_on_disk_are_those_of_the_record(name, tmp_path):
    record, hf = recorded(name, tmp_path)
    trained = {n: tuple(s) for n, s in record["tensors"].items() if is_trained(n, hf)}
    assert tensor_shapes(hf) == trained
    in_parameters = {n for row in record["parameters"].values() for n in row.get("tensors", ())}
    assert in_parameters == trained.keys()


def loaded(hf: HfTensors, record: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Make a whole parameter of the record's checkpoint."""
    tensors = [pattern(name, tuple(record["tensors"][name])) for name in hf.names]
    if hf.layout.all_experts:
        tensors = [tensor[hf.expert] for tensor in tensors]
    whole = hf.layout.from_disk(tensors)
    return whole if hf.layout.weight.float32 else whole.to(dtype)


def differences(record: dict[str, Any], weights: ModelWeights) -> list[str]:
    """Compare every shard, and the tensors made of all shards again, with the record."""
    found, compared = [], 0
    for topology, (ranks, parallel) in TOPOLOGIES.items():
        dtype = torch.bfloat16 if topology == "bf16" else torch.float32
        for rank in range(ranks):
            layers, first_expert = range(len(weights.traits)), 0
            if topology == "PP2":  # one layer on the first stage
                layers = layers[:1] if rank == 0 else layers[1:]
            if topology == "EP2":
                first_expert = rank * weights.sizes["experts"] // 2
            names = TensorNames(weights, layers, first_expert)
            for name, row in record["parameters"].items():
                if topology not in row or row[topology][rank] == "-":
                    continue
                hf = names.find(name)
                if topology not in ("EP2", "PP2") and hf.names != row["tensors"]:
                    found.append(f"{topology} {name}: is made of {hf.names}")
                cut = parallel.get("tensor_model_parallel_size", 1)
                if hf.layout.weight.is_expert:
                    cut = parallel.get("expert_tensor_parallel_size", 1)
                whole = loaded(hf, record, dtype)
                shards = [shard.contiguous() for shard in hf.layout.shards(whole, cut)]
                if checksum(shards[rank if cut > 1 else 0]) != row[topology][rank]:
                    found.append(f"{topology} {name}: another shard on rank {rank}")
                again = hf.layout.to_disk(hf.layout.join(shards))
                for disk_name, tensor in zip(hf.names, again, strict=True):
                    disk = pattern(disk_name, tuple(record["tensors"][disk_name]))
                    disk = disk[hf.expert] if hf.layout.all_experts else disk
                    if not torch.equal(tensor, disk.to(tensor.dtype)):
                        found.append(f"{topology} {name}: is exported as another {disk_name}")
                compared += 1
    assert compared >= 200 or not weights.sizes["experts"]
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_every_ranks_shards_are_those_of_the_record_and_are_exported_as_the_checkpoint(
    name, tmp_path
):
    record, hf = recorded(name, tmp_path)
    assert differences(record, weights_of(hf)) == []


FC1, QKV = "mlp.experts.linear_fc1.weight", "self_attention.linear_qkv.weight"


def exchanged(row: Weight) -> dict[str, Any]:
    """Tensors that hold one another's parts."""
    pairs = zip(row.disk, reversed(row.disk))
    return {"disk": tuple(replace(tensor, parts=other.parts) for tensor, other in pairs)}


def on_disk(**fields: Any) -> Callable[[Weight], dict[str, Any]]:
    return lambda row: {"disk": tuple(replace(tensor, **fields) for tensor in row.disk)}


# words -> the record, the row, what is wrong with it
PLANTED: dict[str, tuple[str, str, dict[str, Any] | Callable[[Weight], dict[str, Any]]]] = {
    "gate and up exchanged": ("qwen3_moe", FC1, exchanged),
    "qkv not by key heads": ("qwen3_moe", QKV, {"groups": None}),
    "o_proj cut by rows": ("qwen3_moe", "self_attention.linear_proj.weight", {"sharded": "rows"}),
    "a down projection is cut": (
        "deepseek_v3",
        "self_attention.linear_kv_down_proj.weight",
        {"sharded": "rows"},
    ),
    "a wide norm is whole": ("minimax_m2", "self_attention.q_layernorm.weight", {"sharded": ""}),
    "rows of gate and up do not alternate": ("gpt_oss", FC1, on_disk(groups=None)),
    "experts are not transposed": ("gpt_oss", FC1, on_disk(transposed=False)),
    "expert biases in the run's dtype": ("glm4_moe", "mlp.router.expert_bias", {"float32": False}),
    "in_proj cut as one": ("qwen3_5_moe", "self_attention.in_proj.weight", {"groups": 1}),
    "a query's gate not by heads": ("qwen3_5_moe", QKV, on_disk(groups=None)),
}


@pytest.mark.parametrize("words", PLANTED)
def test_a_wrong_row_differs_from_the_record(words, tmp_path):
    name, row_name, change = PLANTED[words]
    record, hf = recorded(name, tmp_path)
    right = weights_of(hf)
    (row,) = (row for row in right.table.layer_weights if row.name == row_name)
    wrong = replace(row, **(change(row) if callable(change) else change))
    rows = tuple(wrong if each is row else each for each in right.table.layer_weights)
    weights = replace(right, table=replace(right.table, layer_weights=rows))
    try:
        assert any(row_name.split(".")[-2] in words for words in differences(record, weights))
    except (RuntimeError, ValueError):  # sizes that do not fit
        pass


@pytest.mark.parametrize("name", RECORDS)
def test_rows_with_lora_are_the_linears_that_it_knows_by_their_names(name, tmp_path):
    _, hf = recorded(name, tmp_path)
    if FAMILIES[hf.model_type].lora:
        by_name = LoraSection(lora_rank=1).targets(tensor_shapes(hf))
        weights = weights_of(hf)
        lora_rows = [(weight, prefix) for weight, prefix in weights.rows() if weight.lora]
        by_row = {
            name
            for weight, prefix in lora_rows
            for tensor in weight.disk
            for name in weights.names(prefix, tensor)
        }
        assert by_row == by_name


FIELDS = json.loads((WEIGHTS / "fields.json").read_text())


def test_there_are_fields_of_every_record_and_published_model():
    assert configs().keys() == FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_megatrons_configuration_is_that_of_the_record(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs()[name]))
    assert fields(tmp_path) == FIELDS[name]


def test_a_key_that_is_not_read_differs_from_the_record(tmp_path):
    config = configs()["Kimi-K2-Instruct"]
    del config["rope_scaling"]["beta_fast"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert fields(tmp_path).items() ^ FIELDS["Kimi-K2-Instruct"].items() == {("beta_fast", "1.0")}

"""Weights of Megatron's ranks, compared with records of them (``record_weights.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from r3train.config.hf_facts import HfModelFacts, read_hf_facts
from r3train.families import FAMILIES, tensor_shapes
from r3train.hf_checkpoint import is_trained
from tests.contract.record_weights import WEIGHTS

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

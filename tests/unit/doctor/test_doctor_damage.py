"""Damaged checkpoints and impossible ports are findings with remedies, never tracebacks."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.doctor import machine
from r3train.doctor.command import diagnose
from r3train.doctor.finding import PROBLEM
from r3train.doctor.model import read_weights
from r3train.tiny import TinyOptions, build
from tests.unit.doctor_setups import config_of, problems

GOOD_ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A tiny model to damage."""
    build(tmp_path / "tiny", TinyOptions())
    return tmp_path / "tiny"


def write_shard(file: Path, header: bytes, data: bytes = bytes(24)) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_the_shard_that_is_damaged_below_is_read_where_it_is_whole(tmp_path):
    write_shard(tmp_path / "model.safetensors", json.dumps({"w": GOOD_ENTRY}).encode())
    assert read_weights(tmp_path).dense == 6


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'"text"',
        b'{"w": []}',
        b'{"w": 3}',
        json.dumps({"w": {**GOOD_ENTRY, "data_offsets": None}}).encode(),
        json.dumps({"w": {k: v for k, v in GOOD_ENTRY.items() if k != "data_offsets"}}).encode(),
        json.dumps({"w": {**GOOD_ENTRY, "data_offsets": [0]}}).encode(),
        json.dumps({"w": {**GOOD_ENTRY, "data_offsets": [24, 0]}}).encode(),
        json.dumps({"w": {**GOOD_ENTRY, "data_offsets": ["0", "24"]}}).encode(),
        json.dumps({"w": {**GOOD_ENTRY, "shape": "2x3"}}).encode(),
        json.dumps({"w": {**GOOD_ENTRY, "shape": [2, -3]}}).encode(),
        json.dumps({"w": {**GOOD_ENTRY, "dtype": ["F32"]}}).encode(),
        b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"{\xff}",
    ],
)
def test_a_header_that_is_none_names_its_file(header, tmp_path):
    write_shard(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match="model.safetensors: "):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "3",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"w": 3}}',
        '{"weight_map": {"w": ["model.safetensors"]}}',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_an_index_that_is_none_is_found(index, tiny):
    (tiny / "model" / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json: not an index of weights" in problems(config_of(tiny))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nowhere_as_an_incomplete_download_leaves_is_found(name, tiny):
    file = tiny / "model" / name
    file.unlink(missing_ok=True)
    file.symlink_to("../blobs/0123abcd")
    found = problems(config_of(tiny))
    assert f"{name}: cannot be read: No such file or directory" in found


def test_a_directory_in_a_shards_place_is_found(tiny):
    file = tiny / "model" / "model.safetensors"
    file.unlink()
    file.mkdir()
    assert "model.safetensors: cannot be read: Is a directory" in problems(config_of(tiny))


@pytest.mark.parametrize("port", ["0", "-1", "99999", "65536", "http"])
def test_a_port_that_cannot_be_is_wrong_usage(port):
    result = CliRunner().invoke(main, ["doctor", f"--port={port}"])
    assert result.exit_code == 2 and "--port" in result.output, result.output


@pytest.mark.parametrize("port", ["99999", "-1", "0", "x", "\u00b2"])
def test_a_master_port_that_cannot_be_is_found(port, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.delenv("RANK", raising=False)
    (found,) = [f for f in diagnose(None, 1) if f.subject == "MASTER_PORT"]
    assert found.level == PROBLEM and found.remedy and "1 to 65535" in found.text


@pytest.mark.parametrize("port", [99999, -1, "http"])
def test_a_port_of_the_server_that_cannot_be_is_found(port, tiny):
    assert "SGLang: " in problems(config_of(tiny, sglang={"port": port}))


def test_a_server_address_with_an_impossible_port_is_found():
    (found,) = machine.check_external_server("127.0.0.1:99999")
    assert found.level == PROBLEM and found.remedy

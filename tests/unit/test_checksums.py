"""Checksums of files: each reader has its share, and what is not what was summed is named."""

from __future__ import annotations

import json
import os
import zlib

import pytest

from r3train.checksums import check, checksum, checksums, parsed, part_of
from r3train.hf_checkpoint import MARKER, check_export, write_marker
from r3train.trainer.megatron.saved_state import CHECKSUMS, STATE, read_checksums, read_state


@pytest.fixture
def files(tmp_path):
    for i, size in enumerate((0, 1, 5_000_000, 70, 9)):
        (tmp_path / f"file{i}").write_bytes(os.urandom(size))
    return tmp_path


def test_readers_share_the_files_each_has_one_and_the_largest_is_alone(files):
    sums = checksums(files, [path.name for path in files.iterdir()])
    assert sums["file2"]["bytes"] == 5_000_000 and checksum(files / "file2") == sums["file2"]
    # more than one read
    assert sums["file2"]["crc32"] == zlib.crc32((files / "file2").read_bytes())
    for parts in (1, 2, 3, 9):
        shares = [part_of(sums, part, parts) for part in range(parts)]
        assert sorted(name for share in shares for name in share) == sorted(sums)
        assert parts == 1 or ["file2"] in shares


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged: 4999999 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "damaged: 5000001 bytes"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is a FIFO"),
    ],
)
def test_a_file_that_is_not_what_was_summed_is_named(files, damage, words):
    names = [path.name for path in files.iterdir()]
    sums = checksums(files, names)
    check(files, sums, names, files / CHECKSUMS)
    damage(files / "file2")
    with pytest.raises(ValueError, match=f"{files / 'file2'}: {words}"):
        check(files, sums, names, files / CHECKSUMS)


def test_any_bit_of_a_file_counts(tmp_path):
    path, content = tmp_path / "file", os.urandom(40)
    path.write_bytes(content)
    sums = checksums(tmp_path, ["file"])
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="damaged"):
            check(tmp_path, sums, ["file"], tmp_path / CHECKSUMS)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {"../outside": {"bytes": 1, "crc32": 2}},
        {"a/b": {"bytes": 1, "crc32": 2}},
        {"a": {"bytes": 1}},
        {"a": {"bytes": 1, "crc32": "2"}},
        {"a": 3},
    ],
)
def test_damaged_checksums_are_refused_by_name(tmp_path, found):
    with pytest.raises(ValueError, match=CHECKSUMS):
        parsed(found, tmp_path / CHECKSUMS)
    (tmp_path / CHECKSUMS).write_text(json.dumps({"files": found}))
    with pytest.raises(ValueError, match=CHECKSUMS):
        read_checksums(tmp_path)


def test_the_state_of_a_checkpoint_is_checked_before_it_is_read(tmp_path):
    state = {"num_rollouts": 7, "weight_version": 7, "topology": {"world_size": 1}}
    (tmp_path / STATE).write_text(json.dumps(state))
    assert read_checksums(tmp_path) is None and read_state(tmp_path)["num_rollouts"] == 7
    text = json.dumps({"files": checksums(tmp_path, [STATE])})
    (tmp_path / CHECKSUMS).write_text(text)
    assert read_state(tmp_path)["num_rollouts"] == 7
    (tmp_path / STATE).write_text(json.dumps(state | {"weight_version": 6}))
    with pytest.raises(ValueError, match=f"{tmp_path / STATE}: damaged"):
        read_state(tmp_path)


def test_of_an_export_all_is_checked_that_a_program_reads(tmp_path):
    names = ("model-00001-of-00001.safetensors", "tokenizer.json", "merges.txt", "config.json")
    for name in (*names, "README.md", "LICENSE"):
        (tmp_path / name).write_text(f"{name} as it was\n")
    check_export(tmp_path, weights=True)  # it is nobody's export yet
    write_marker(tmp_path, {"num_tensors": 1})
    marker = json.loads((tmp_path / MARKER).read_text())
    assert marker["num_tensors"] == 1 and sorted(marker["files"]) == sorted(names)
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("edited\n")
    check_export(tmp_path, weights=True)
    for name in names:
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before.replace("was", "is"))
        with pytest.raises(ValueError, match=f"{tmp_path / name}: damaged.*remove its entry"):
            check_export(tmp_path, weights=True)
        if name.endswith(".safetensors"):
            check_export(tmp_path, weights=False)
        (tmp_path / name).write_text(before)
    (tmp_path / MARKER).write_text(json.dumps({"num_tensors": 1}))  # of before there were any
    (tmp_path / "config.json").write_text("edited\n")
    check_export(tmp_path, weights=True)

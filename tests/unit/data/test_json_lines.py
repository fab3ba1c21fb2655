"""Appending after a crash in mid-line, and reading what is left."""

import subprocess
import sys

import pytest

from r3train.data.json_lines import append_lines, cut_truncated_line, read_lines


@pytest.mark.parametrize("torn", ["", '{"a": 1', "x" * 200_000, '{"a": "' + "y" * 65_536])
def test_what_a_crash_left_is_cut_off_before_the_next_record(tmp_path, torn):
    path = tmp_path / "records.jsonl"
    append_lines(path, [{"n": 0}, {"n": 1}])
    with path.open("a") as file:
        file.write(torn)
    assert read_lines(path) == [{"n": 0}, {"n": 1}]
    append_lines(path, [{"n": 2}])
    assert read_lines(path) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert path.read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'


def test_a_file_that_is_one_torn_line_is_emptied(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"n"')
    cut_truncated_line(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line, message", [('{"n": 1', r"records.jsonl:2: not JSON"), ("[1]", ":2: got list, expected")]
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line, message):
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"n": 0}}\n{line}\n{{"n": 2}}\n')
    with pytest.raises(ValueError, match=message):
        read_lines(path)


def test_a_disk_that_is_full_leaves_no_part_of_a_record(tmp_path):
    """A limit on the file's size stands for the disk: the write comes back short, then fails."""
    path = tmp_path / "records.jsonl"
    append_lines(path, [{"n": 0}])
    before = path.read_bytes()
    script = (
        "import resource, signal, sys; from pathlib import Path;"
        "from r3train.data.json_lines import append_lines;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "append_lines(Path(sys.argv[1]), [{'text': 'z' * 8192}])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0 and "File too large" in run.stderr
    assert path.read_bytes() == before

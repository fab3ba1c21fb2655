"""Run directories that came from somebody else: nothing in them hangs a reader or is written through."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.config import files
from r3train.config.files import bounded_lines, open_regular, write_atomically
from r3train.config.sources import ConfigError
from r3train.data.json_lines import append_lines
from r3train.launch.job.run_dir import claim_directories, OWNER_FILE
from r3train.loop.rollout_file import read_samples
from r3train.trainer.megatron.saved_state import LATEST, STATE, read_state
from tests.unit.evidence_dirs import write_run
from tests.unit.launch.test_compare import run_dir
from tests.unit.launch.test_one_owner import _config
from tests.unit.report_runs import with_metrics

KEPT = "a file of mine\n"


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    moved = path.with_name(f"moved_{path.name}")
    path.rename(moved)
    path.symlink_to(moved)


PLANTS = {"fifo": (fifo, "a FIFO"), "endless": (endless, "a link"), "link": (link, "a link")}


def within_a_minute(call, *arguments):
    """Return what ``call`` returns; a reader that hangs fails the test and not the whole run."""
    done: Future = Future()

    def work() -> None:
        try:
            done.set_result(call(*arguments))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result(timeout=60)


def said_by(*words: object) -> tuple[int, str]:
    result = within_a_minute(lambda: CliRunner().invoke(main, list(map(str, words))))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    "command, name, plant",
    [
        ("report", "metrics.jsonl", "link"),
        ("check-evidence", "evidence/rank_00000.jsonl", "endless"),
        ("compare", "rollouts/rollout_0000000.safetensors", "fifo"),
    ],
)
def test_a_reader_of_a_run_names_what_is_no_file_of_its_own(command, name, plant, tmp_path):
    run = tmp_path / "run"
    if command == "check-evidence":
        write_run(run)
        with_metrics(run)
    else:
        run_dir(run)
        with_metrics(run) if command == "report" else None
    place, (planted, kind) = run / name, PLANTS[plant]
    assert place.is_file()
    planted(place)
    others = (run_dir(tmp_path / "other"),) if command == "compare" else ()
    code, said = said_by(command, run, *others)
    assert place.name in said and f"is {kind}, expected a regular file" in said, said
    assert code == {"check-evidence": 1}.get(command, 2)


def test_a_start_that_resumes_names_what_is_no_file(tmp_path):
    planted, kind = PLANTS["fifo"]
    checkpoint = tmp_path / "iter_0000007"
    checkpoint.mkdir()
    planted(checkpoint / STATE)
    planted(tmp_path / "buffer.safetensors")
    with pytest.raises(ValueError, match=f"{STATE}: .*expected a regular file"):
        within_a_minute(read_state, checkpoint)
    with pytest.raises(ValueError, match=f"buffer.safetensors: .* is {kind}, expected a regular"):
        within_a_minute(read_samples, tmp_path / "buffer.safetensors")


def test_a_line_without_end_is_refused_before_memory_is(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n" + b"x" * 63 + b"\n" + b"y" * 65 + b"\n")
    with open_regular(path) as file:
        lines = bounded_lines(file, path)
        assert [next(lines), next(lines)] == [b"{}\n", b"x" * 63 + b"\n"]
        with pytest.raises(OSError, match="line 3 has more than 64 bytes") as raised:
            next(lines)
    assert raised.value.filename == str(path)


@pytest.fixture
def mine(tmp_path) -> Path:
    path = tmp_path / "mine"
    path.write_text(KEPT)
    return path


def test_the_page_of_a_report_replaces_a_link_and_does_not_write_through_it(tmp_path, mine):
    run = with_metrics(tmp_path / "run")
    (run / "report.html").symlink_to(mine)
    (run / f"report.html.{os.getpid()}.tmp").symlink_to(mine)
    code, said = said_by("report", run)
    assert code == 0, said
    assert mine.read_text() == KEPT
    assert not (run / "report.html").is_symlink()
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_an_atomic_write_leaves_no_scratch_file(tmp_path):
    path = tmp_path / "address"
    path.write_text("old")
    write_atomically(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["address"]
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["address"]


@pytest.mark.parametrize(
    "setting, name",
    [
        ("run_dir", "logs/rank_00000.log"),
        ("save", f"{LATEST}.tmp"),
        ("save_hf", OWNER_FILE),
    ],
)
def test_a_start_writes_nothing_through_a_link(setting, name, tiny, tmp_path, mine):
    taken, flag = tmp_path / "taken", "--" + setting.replace("_", "-")
    place = tmp_path / f".taken{OWNER_FILE}" if setting == "save_hf" else taken / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(mine)
    own = () if setting == "run_dir" else ("--run-dir", str(tmp_path / "own"))
    with ExitStack() as claims, pytest.raises(ConfigError, match=f"{place}.*is a link") as raised:
        claim_directories(_config(tiny, *own, flag, str(taken)), claims)
    assert f"({setting})" in str(raised.value) and "\n" not in str(raised.value)
    assert mine.read_text() == KEPT


def test_lines_are_not_appended_through_a_link(tmp_path, mine):
    (tmp_path / "metrics.jsonl").symlink_to(mine)
    with pytest.raises(OSError, match="is a link, expected a regular file"):
        append_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    assert mine.read_text() == KEPT

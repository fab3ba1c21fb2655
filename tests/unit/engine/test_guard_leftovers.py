"""Files that a guard leaves at SIGKILL, and the next one removes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from r3train.engine import server_guard
from tests.unit.rewards.test_scoring import wait_for

# a "server" whose worker holds shared memory, as SGLang's does
SERVER = """
import mmap, os, setproctitle, sys, tempfile, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
setproctitle.setproctitle("sglang::scheduler")
print(tempfile.gettempdir(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def shared():
    """A name of SGLang's under /dev/shm."""
    path = Path(f"/dev/shm/sglang_loads_test_{uuid.uuid4().hex}.shm")
    yield path
    path.unlink(missing_ok=True)


def guard(tmp_path, *command) -> subprocess.Popen:
    """A guard with a temporary directory of the test's."""
    return subprocess.Popen(
        [sys.executable, "-m", "r3train.engine.server_guard", "--owner-pid", str(os.getpid())]
        + ["--", sys.executable, "-c", *map(str, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        text=True,
    )


def end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def test_the_next_guard_removes_what_one_that_was_killed_has_left_and_nothing_else(
    tmp_path, shared
):
    killed = guard(tmp_path, SERVER, shared)
    directory = Path(killed.stdout.readline().strip())
    wait_for(lambda: str(shared) in (directory / ".shared_memory").read_text())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert directory.is_dir() and shared.exists()
    foreign, unlisted = tmp_path / "r3t-foreign", tmp_path / "other"
    foreign.mkdir(), unlisted.mkdir()
    lives = guard(tmp_path, SERVER, f"{shared}.2")
    try:
        its_own = Path(lives.stdout.readline().strip())
        assert not directory.exists() and not shared.exists()
        third = guard(tmp_path, "print('began', flush=True)")
        assert third.stdout.readline() == "began\n"
        assert its_own.is_dir(), "of a guard that lives"
        end(third)
    finally:
        end(lives)
        Path(f"{shared}.2").unlink(missing_ok=True)
    left = {each.name for each in tmp_path.iterdir()} - {f"r3train-{os.getuid()}"}
    assert left == {"r3t-foreign", "other"}, "without a list it may be anybody's"
    end(killed)


def test_a_list_names_no_other_files(tmp_path, shared, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory, kept = tmp_path / "r3t-x", tmp_path / "kept"
    directory.mkdir()
    kept.write_text("ours")
    shared.write_text("")
    folder = Path(f"/dev/shm/sglang_test_{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        below = f"{folder}/../../..{kept}"
        assert os.path.samefile(below, kept)
        (directory / ".shared_memory").write_text(json.dumps([str(kept), below, 7, str(shared)]))
        server_guard.remove_leftovers()
    finally:
        folder.rmdir()
    assert kept.exists() and not shared.exists() and not directory.exists()


@pytest.mark.parametrize("how", ["another user's", "a link", "a list that is a link"])
def test_a_directory_that_is_not_ours_alone_to_remove_stays(how, tmp_path, shared, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    directory = tmp_path / "temporary" / "r3t-x"
    target = tmp_path / "target"
    target.mkdir()
    shared.write_text("")
    listed = json.dumps([str(shared)])
    if how == "a link":
        directory.symlink_to(target)
        (target / ".shared_memory").write_text(listed)
    else:
        directory.mkdir()
        list_of_it = directory / ".shared_memory"
        if how == "a list that is a link":
            (target / "list").write_text(listed)
            list_of_it.symlink_to(target / "list")
        else:
            list_of_it.write_text(listed)
            monkeypatch.setattr("os.getuid", lambda: 4_000_000_001)
    server_guard.remove_leftovers()
    assert shared.exists() and directory.exists() and target.exists()

"""The error that ends a run is shown first, by rank 0 for all ranks; a full disk is named."""

from __future__ import annotations

import errno
import json
import os
import threading
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from torch.distributed import HashStore

from r3train.launch.start import last_words
from r3train.launch.start.last_words import LastWords, no_space
from r3train.observe.console import RunDisplay


class Log:
    """The log of a rank: what it records, and what it shows on the terminal."""

    def __init__(self) -> None:
        self.recorded: list[BaseException] = []
        self.shown: list[BaseException] = []
        self.record_error, self.show_error = self.recorded.append, self.shown.append


@pytest.fixture
def ranks(tmp_path):
    """Two ranks with one store; ``screen()`` is what rank 0 has shown."""
    store, out = HashStore(), StringIO()
    console = Console(file=out, width=80)
    both = []
    for rank in (0, 1):
        display = RunDisplay(1, enabled=rank == 0, live=False, console=console)
        words = LastWords(rank, display, [tmp_path, None])
        words.log, words.run_dir, words.store = Log(), tmp_path, store
        both.append(words)
        console = Console(file=StringIO())
    return SimpleNamespace(zero=both[0], one=both[1], screen=out.getvalue)


def test_rank_0_shows_the_error_of_the_rank_whose_end_it_noticed(ranks):
    ranks.one.say(OSError("cannot write\nthe tensors"))
    ranks.zero.say(RuntimeError("Connection closed by peer"))
    lines = ranks.screen().splitlines()
    assert lines[0] == "--- run failed ---"
    assert lines[-2] == "error: RuntimeError: Connection closed by peer"
    assert lines[-1] == "rank 1: OSError: cannot write the tensors"


def test_an_error_of_rank_0s_own_is_explained_by_nobody_else(ranks):
    ranks.one.say(RuntimeError("Connection closed by peer"))
    ranks.zero.say(ValueError("the reward raised"))
    assert "rank 1" not in ranks.screen()


def test_errors_of_closing_are_recorded_and_not_shown(ranks):
    first, later = ValueError("the cause"), OSError("of closing")
    for error in (first, first, later):
        ranks.zero.say(error)
    assert ranks.zero.log.recorded == [first, later]
    assert ranks.screen().count("run failed") == 1 and "of closing" not in ranks.screen()


def test_another_rank_stays_until_rank_0_has_shown_an_error(ranks, monkeypatch):
    monkeypatch.setattr(last_words, "RANK_0_SHOWS_S", 60.0)
    ranks.one.say(OSError("x"))
    stays = threading.Thread(target=ranks.one.stay)
    stays.start()
    stays.join(0.3)
    assert stays.is_alive()
    ranks.zero.say(RuntimeError("y"))
    stays.join(30)
    assert not stays.is_alive() and ranks.one.log.shown == []


def test_another_rank_shows_its_own_error_where_rank_0_shows_none(ranks, monkeypatch):
    monkeypatch.setattr(last_words, "RANK_0_SHOWS_S", 0.0)
    error = OSError("x")
    ranks.one.say(error)
    ranks.one.stay()
    assert ranks.one.log.shown == [error]


def test_the_first_line_of_the_cause_is_the_last_line(ranks):
    ranks.zero.say(OSError("the server ended with exit code 9; last lines of LOG:\nthey\nwere"))
    lines = ranks.screen().splitlines()
    assert lines[-1] == "error: OSError: the server ended with exit code 9; last lines of LOG:"
    assert lines[-3:-1] == ["details: they", "were"]


def test_a_store_whose_launcher_has_gone_is_not_asked(ranks, monkeypatch):
    """torch prints its frames for that, below what the rank has said."""
    asked = []
    for words in (ranks.zero, ranks.one):
        words.store = SimpleNamespace(check=asked.append, set=asked.append, get=asked.append)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    ranks.one.say(OSError("x"))
    ranks.one.stay()
    ranks.zero.say(RuntimeError("y"))
    ranks.zero.shown()
    assert asked == [] and "RuntimeError: y" in ranks.screen()


def test_the_launcher_is_told_in_the_file_that_torchrun_reads(ranks, tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from r3train.torchrun_start import unspoken

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ranks.one.say(ValueError("bad \ud800"))
    assert json.loads(path.read_text())["message"]["message"].startswith("ValueError: bad ")
    spoke = {1: ProcessFailure(1, 10, 1, str(path)), 0: ProcessFailure(0, 9, -15, "none")}
    assert unspoken(ChildFailedError("x", spoke)) is None
    killed = {**spoke, 0: ProcessFailure(0, 9, -9, "none")}
    said = unspoken(ChildFailedError("x", killed))
    assert said.startswith("rank 0 (process 9) was ended by SIGKILL: ") and "memory" in said
    silent = {0: ProcessFailure(0, 9, 1, "none")}
    assert unspoken(ChildFailedError("x", silent)) == "rank 0 (process 9) ended: exit code 1"


def test_a_full_disk_is_named_by_file_or_by_directory(tmp_path, monkeypatch):
    assert no_space(ValueError("x"), [tmp_path, tmp_path / "not made"]) is None
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")
        except OSError as error:
            raise RuntimeError("cannot go on") from error
    except RuntimeError as error:
        assert no_space(error, [tmp_path]) == "no space left on run/metrics.jsonl"
    full = SimpleNamespace(f_bavail=2, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert no_space(ValueError("x"), [tmp_path]) == f"no space left on {tmp_path} (8,192 bytes)"

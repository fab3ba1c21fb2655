"""Wards that stop or kill their guard, leave it or are many: no session hangs, and nothing is left."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from r3train.agents.command import run_command
from r3train.agents.guard import GRACE_S
from r3train.agents.http import Access
from r3train.chat.base import AgentFailed
from r3train.config.agent_settings import AgentSection
from r3train.process_tree import marked

_ACCESS = Access("http://127.0.0.1:1/v1", "sk-session")
_WRITES = 'echo 1 > "$R3TRAIN_REWARD_FILE"'
# of the end of a session; on a busy machine all takes longer
_AT_ONCE_S, _BOUND_S = 15.0, GRACE_S + 25.0

# An orphan that kills both of its guards, the one that it does not see first.
_KILLS_BOTH = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(f"pid{os.getpid()}", "w").close()
        time.sleep(0.5)
        seen = os.getppid()
        unseen = int(open(f"/proc/{seen}/stat").read().rpartition(")")[2].split()[1])
        for guard in unseen, seen:
            assert b"r3train.agents.guard" in open(f"/proc/{guard}/cmdline", "rb").read()
        for guard in unseen, seen:
            os.kill(guard, 9)
        open("killed", "w").close()
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""


async def _end(directory: Path, *command: str, timeout_s: float = 600.0):
    """The outcome of a session, its seconds, and the processes that it left."""
    began = time.monotonic()
    try:
        outcome = await run_command(
            command, _ACCESS, {}, directory, AgentSection(agent_timeout_s=timeout_s)
        )
    except AgentFailed as error:
        outcome = str(error)
    seconds = time.monotonic() - began
    told = [int(file.name[3:]) for file in (directory / "work").glob("pid*")]
    alive = psutil.process_iter(["status"])
    running = [p.pid for p in alive if p.info["status"] != psutil.STATUS_ZOMBIE]
    return outcome, seconds, {*told} & {*running} | {*marked(f"R3TRAIN_GUARDED={directory}")}


async def test_a_guard_that_is_stopped_goes_on_at_once(tmp_path):
    program = f"kill -STOP $PPID; sleep 0.2; kill -STOP $PPID; {_WRITES}"
    outcome, seconds, left = await _end(tmp_path, "sh", "-c", program)
    assert (outcome, left) == (1.0, set()) and seconds < _AT_ONCE_S


async def test_a_guard_that_is_stopped_again_and_again_ends_with_its_tree(tmp_path):
    program = "setsid sh -c 'echo > pid$$; while kill -STOP '$PPID'; do :; done' & sleep 1000"
    outcome, seconds, left = await _end(tmp_path, "sh", "-c", program, timeout_s=1.0)
    assert "took longer than 1 s" in outcome and left == set()
    assert seconds < 1.0 + _BOUND_S and list((tmp_path / "work").iterdir())


@pytest.fixture
def signals_as_by_default():
    """Under nohup and in a shell's background these are ignored, by children too: a program that has a handler resets them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("how", ["KILL", "INT", "HUP", "ABRT"])
async def test_a_guard_that_is_killed_ends_its_session_at_once_and_leaves_nothing(
    tmp_path, how, signals_as_by_default
):
    program = f"""
        (setsid env -i sh -c 'echo > pid$$; trap "" TERM HUP INT; sleep 1000 & wait' &) &
        while [ -z "$(ls)" ]; do sleep 0.01; done
        kill -{how} $PPID; sleep 1000
    """
    outcome, seconds, left = await _end(tmp_path, "sh", "-c", program)
    assert "ended with" in outcome and left == set()
    assert seconds < _AT_ONCE_S and list((tmp_path / "work").iterdir())


async def test_an_orphan_that_kills_both_of_its_guards_is_found_by_its_mark(tmp_path):
    outcome, seconds, left = await _end(tmp_path, sys.executable, "-c", _KILLS_BOTH)
    assert (tmp_path / "work" / "killed").exists()
    assert "ended with signal SIGKILL" in outcome and left == set() and seconds < _AT_ONCE_S


async def test_the_guard_of_a_guard_may_be_stopped_too(tmp_path):
    program = """
        echo > pid$$; (setsid sh -c 'echo > pid$$; trap "" TERM; sleep 1000 & wait' &)
        kill -STOP $(ps -o ppid= -p $PPID)
    """
    outcome, seconds, left = await _end(tmp_path, "sh", "-c", program, timeout_s=1.0)
    assert "took longer than 1 s" in outcome and left == set() and seconds < 1.0 + _BOUND_S


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_nothing_is_left_of_many_children(tmp_path, count):
    program = f"""
        i=0; while [ $i -lt {count} ]; do sleep 1000 & i=$((i + 1)); done
        read -r children < /proc/$$/task/$$/children; set -- $children; echo $# > count; {_WRITES}
    """
    outcome, _, left = await _end(tmp_path, "sh", "-c", program)
    ended_s = time.time() - (tmp_path / "reward.json").stat().st_mtime
    assert int((tmp_path / "work" / "count").read_text()) == count
    assert (outcome, left) == (1.0, set()) and ended_s < _BOUND_S

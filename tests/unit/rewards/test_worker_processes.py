"""Children of a reward's process end with it, and its answers are never unpickled."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.unit.rewards.test_scoring import is_running, sample, scored, settings, wait_for

from r3train.rewards.scoring import Scorer
from r3train.rewards import worker

HERE = f"{__name__}:"


# rewards, each of which runs in a worker


def _pid_file(prompt) -> Path:
    return Path(prompt.metadata["directory"]) / "pids"


def leaves_children(prompt, text, ids):
    """Start a child that leaves the session, and a grandchild whose parent has ended."""
    code = (
        "import os, sys, time; os.setsid(); (os.fork() and os._exit(0)); "
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(1000)"
    )
    path = _pid_file(prompt)
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code, path], check=True)
    while len(path.read_text().split()) < 3:
        time.sleep(0.01)
    return 1.0


def leaves_children_and_hangs(prompt, text, ids):
    leaves_children(prompt, text, ids)
    time.sleep(1000)


def leaves_children_and_holds(prompt, text, ids):
    """Keep the interpreter, in which nothing of Python runs for years."""
    leaves_children(prompt, text, ids)
    re.match("(a+)+$", "a" * 64 + "b")


def leaves_children_and_ends(prompt, text, ids):
    leaves_children(prompt, text, ids)
    os._exit(7)


def leaves_children_and_is_killed(prompt, text, ids):
    leaves_children(prompt, text, ids)
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(1000)


class Evil:
    """A pickle that makes a file where it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _socket() -> int:
    """The worker's end of the socket, as its command line names it."""
    return int(sys.argv[1])


def writes_a_pickle(prompt, text, ids):
    os.write(_socket(), worker.packed((1, None, Evil(_pid_file(prompt)))))
    return 1.0


def returns_what_pickles(prompt, text, ids):
    return Evil(_pid_file(prompt))


def writes_a_long_answer(prompt, text, ids):
    os.write(_socket(), worker.LENGTH.pack(1 << 40) + b"[")
    time.sleep(1000)


def writes_deep_json(prompt, text, ids):
    os.write(_socket(), worker.framed(b"[" * 100_000))
    time.sleep(1000)


def writes_a_table(prompt, text, ids):
    os.write(_socket(), worker.framed(b'{"a": 1}'))
    time.sleep(1000)


def writes_two_values(prompt, text, ids):
    os.write(_socket(), worker.framed(b"[1, null]"))
    time.sleep(1000)


# the tests


def children(tmp_path) -> list[int]:
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    return pids


@pytest.mark.parametrize(
    "name, error",
    [
        ("leaves_children", None),
        ("leaves_children_and_hangs", "took longer than reward_timeout_s 8"),
        ("leaves_children_and_ends", r"ended its process \(exit code 7\)"),
        ("leaves_children_and_is_killed", r"ended its process \(signal SIGSEGV\)"),
    ],
)
def test_children_that_left_the_session_end_with_the_function(name, error, tmp_path):
    data = settings(rm_type=HERE + name, reward_timeout_s=8.0)
    asked = sample(metadata={"directory": str(tmp_path)})
    if error is None:
        assert scored(data, asked) == [1.0]
    else:
        with pytest.raises(ValueError, match=error):
            scored(data, asked)
    assert not [pid for pid in children(tmp_path) if is_running(pid)], "it ended before them"


@pytest.mark.parametrize("name", ["leaves_children_and_hangs", "leaves_children_and_holds"])
def test_children_that_left_the_session_end_with_a_trainer_that_is_killed(name, tmp_path):
    code = f"""
from tests.unit.rewards.test_scoring import sample, scored, settings
asked = sample(metadata={{"directory": {str(tmp_path)!r}}})
scored(settings(rm_type={HERE + name!r}, reward_timeout_s=600.0), asked)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as trainer:
        pids = tmp_path / "pids"
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3)
        started = [p.pid for p in psutil.Process(trainer.pid).children(recursive=True)]
        assert set(children(tmp_path)) < set(started)
        time.sleep(1.0)  # until the interpreter is held
        trainer.kill()
    wait_for(lambda: not any(map(is_running, started)))


def test_children_run_on_while_their_function_is_not_asked(tmp_path):
    """A server that a reward has started for itself lives as long as its process."""
    asked = sample(metadata={"directory": str(tmp_path)})

    async def ask(scorer):
        assert await scorer(asked) == 1.0
        return [is_running(pid) for pid in children(tmp_path)]

    scorer = Scorer(settings(rm_type=HERE + "leaves_children"))
    try:
        assert asyncio.run(ask(scorer)) == [True] * 3
    finally:
        scorer.close()


@pytest.mark.parametrize(
    "name, error",
    [
        ("writes_a_pickle", "wrote to the socket of its process: .*codec can't decode"),
        ("returns_what_pickles", "must be a finite number, got .*Evil"),
        ("writes_a_long_answer", "an answer of 1099511627776 bytes, expected at most 67108864"),
        ("writes_deep_json", "an answer of too many levels"),
        ("writes_a_table", r"the answer \{'a': 1\}, expected \[number, error, value\]"),
        ("writes_two_values", r"the answer \[1, None\], expected \[number, error, value\]"),
    ],
)
def test_nothing_that_a_process_writes_is_unpickled_and_no_answer_is_an_error(
    name, error, tmp_path
):
    asked = sample(metadata={"directory": str(tmp_path)})
    with pytest.raises(ValueError, match=error):
        scored(settings(rm_type=HERE + name), asked)
    assert not list(tmp_path.iterdir()), "the parent ran what the pickle names"

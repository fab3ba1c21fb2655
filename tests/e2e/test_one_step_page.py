"""docs/development/one_step.md names every file that runs in a step of a real job, and no file that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import r3train
from tests.e2e import jobs

PACKAGE = Path(r3train.__file__).parent
PAGE = PACKAGE.parent / "docs" / "development" / "one_step.md"
ALL_FILES = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}


def named_files(text: str) -> set[str]:
    """The files of r3train that a page names: ``room/file.py``, and ``file.py`` behind it for another of the room."""
    found, room = set(), ""
    for name in re.findall(r"`([\w/]+\.py)`", text):
        in_room = f"{room}/{name}"
        found.add(in_room if in_room in ALL_FILES else name)
        if "/" in name and in_room not in ALL_FILES:
            room = name.rpartition("/")[0]
    return found


def test_a_name_behind_another_is_of_its_room():
    text = "`loop/intake.py`, `prepare.py`, and `ids.py`; `proof/step_verdict.py`, `nobody.py`"
    expected = {"loop/intake.py", "loop/prepare.py", "ids.py", "proof/step_verdict.py", "nobody.py"}
    assert named_files(text) == expected


def test_every_file_of_the_page_is_there():
    assert named_files(PAGE.read_text(encoding="utf-8")) - ALL_FILES == set()


@pytest.mark.e2e
def test_a_step_runs_no_file_that_the_page_does_not_name(tmp_path, served_flags):
    job = jobs.run(
        tmp_path / "run",
        *served_flags,
        *jobs.R3_FLAGS,
        *"--num-rollout 3".split(),
        program=("-m", "tests.e2e.train_traced", str(tmp_path), "1"),
    )
    assert job.code == 0, job.output
    ran = {f for file in tmp_path.glob("rank_*.json") for f in json.loads(file.read_text())}
    assert {"loop/async_loop.py", "engine/answer.py", "trainer/megatron/replay.py"} <= ran
    assert ran - named_files(PAGE.read_text(encoding="utf-8")) == set()

"""Jobs of a fleet that changes: what is planned, and what is wrong with a job that has ended."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import fleet_chaos
from benchmarks.fleet_chaos import GROUPS, KINDS, plan, problems
from r3train.data.json_lines import append_lines
from r3train.loop import prompt_log

STEPS = 3


def test_a_seed_has_its_plan_whose_events_come_before_the_last_step():
    plans = [plan(seed, 10) for seed in range(60)]
    assert plans == [plan(seed, 10) for seed in range(60)] and len(set(map(tuple, plans))) == 60
    assert {event.kind for events in plans for event in events} == set(KINDS)
    for events in plans:
        steps = [event.step for event in events]
        assert steps == sorted(set(steps)) and 1 <= steps[0] and steps[-1] < 9


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Makes a job that has ended: groups of each step, weights, and the exit code of ``check-evidence``."""

    def make(groups=tuple(range(GROUPS * STEPS)), weights=b"weights", code=0):
        monkeypatch.setattr(
            fleet_chaos.subprocess,
            "run",
            lambda words, **_: subprocess.CompletedProcess(words, code),
        )
        groups_by_step = [groups[first : first + GROUPS] for first in range(0, len(groups), GROUPS)]
        lines = [
            {
                "step": step,
                "group_ids": list(groups_of_step),
                "sample_ids": [[2 * group, 2 * group + 1] for group in groups_of_step],
            }
            for step, groups_of_step in enumerate(groups_by_step)
        ]
        (tmp_path / "hf").mkdir()
        append_lines(tmp_path / prompt_log.FILE, lines)
        (tmp_path / "hf/model-00001-of-00001.safetensors").write_bytes(weights)
        return problems(tmp_path, b"weights", STEPS)

    return make


def test_a_job_that_trained_what_it_should_has_no_problem(ended):
    assert ended() == []


@pytest.mark.parametrize(
    "job",
    [
        {"groups": (*range(11), 12)},
        {"groups": (*range(11), 10)},
        {"groups": tuple(range(8))},
        {"weights": b"Weights"},
        {"code": 1},
    ],
    ids=["a group is lost", "twice", "a step is lost", "other weights", "no proof"],
)
def test_what_went_wrong_is_found(job, ended):
    assert ended(**job)

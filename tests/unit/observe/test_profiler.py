"""Traces of a range of rollouts, on the ranks that are named."""

import gzip
import json

import pytest
import torch

from r3train.config.run import RunSection
from r3train.observe.profiler import StepProfiler


def events(path):
    return [e.get("name") for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


@pytest.mark.parametrize("start", [0, 2])
def test_the_trace_holds_the_rollouts_of_the_range_alone(tmp_path, start):
    settings = {"profile_step_start": 1, "profile_step_end": 3, "profile_ranks": (0, 2)}
    run = RunSection(use_pytorch_profiler=True, **settings)
    operators = [torch.neg, torch.sin, torch.cos, torch.tan]
    for rank in range(3):
        profiler = StepProfiler(run, tmp_path, rank)
        for rollout_id in range(start, 4):  # a resumed run begins inside the range
            profiler.at(rollout_id)
            operators[rollout_id](torch.ones(2))
        profiler.close()
        profiler.close()
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == [f"trace_rank_0000{n}.json.gz" for n in (0, 2)]
    names = set(events(files[0])) & {"aten::neg", "aten::sin", "aten::cos", "aten::tan"}
    assert names == ({"aten::sin", "aten::cos"} if start == 0 else {"aten::cos"})


def test_a_range_that_the_run_ends_in_is_written_all_the_same(tmp_path):
    run = RunSection(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=9)
    profiler = StepProfiler(run, tmp_path, 0)
    profiler.at(0)
    torch.ones(2).neg()
    profiler.close()
    assert "aten::neg" in events(tmp_path / "profile/trace_rank_00000.json.gz")


def test_the_history_of_memory_is_kept_in_the_range_and_written_once(tmp_path, monkeypatch):
    """CUDA's part of torch is stood in for: it records on a device only."""
    calls = []
    note = lambda what: lambda *of, **settings: calls.append((what, *of, *settings.items()))
    for what in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(torch.cuda.memory, what, note(what))
    run = RunSection(record_memory_history=True, profile_step_start=1, profile_step_end=2)
    profiler = StepProfiler(run, tmp_path, 0)
    for rollout_id in range(4):
        profiler.at(rollout_id)
        calls.append(rollout_id)
    profiler.close()
    assert calls == [
        0,
        ("_record_memory_history", ("max_entries", 100_000)),
        1,
        ("_dump_snapshot", str(tmp_path / "profile/memory_rank_00000.pickle")),
        ("_record_memory_history", ("enabled", None)),
        2,
        3,
    ]


def test_without_the_switch_nothing_is_written(tmp_path):
    profiler = StepProfiler(RunSection(), tmp_path, 0)
    for rollout_id in range(13):
        profiler.at(rollout_id)
    profiler.close()
    assert not list(tmp_path.iterdir())

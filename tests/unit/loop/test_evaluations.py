"""Evaluations of a run: written as a whole, not done twice after a resume, lost alone where they fail."""

import json
from types import SimpleNamespace

import pytest

from r3train.generation.eval_sets import EvaluationEnded
from r3train.loop.run_evaluations import Evaluations
from r3train.loop.run_state import WatchedSource
from r3train.loop.stop import StopRequested
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter, read_evaluations, summarise_evaluations


def row(reward, version, **facts):
    row = {"reward": reward, "response_len": 3, "finish_reason": "stop", "version": version}
    return {"prompt_id": "p:0", "sample": 0, "answer": "a", **row, **facts}


class Source:
    """Evaluates a set to two rows with the reward that the test sets; or fails."""

    def __init__(self):
        self.begun, self.reward, self.fails, self.wait_error = [], 1.0, {}, None

    def begin_evaluation(self, sets):
        self.begun.append([asked.name for asked in sets])

    def await_evaluation(self, on_wait=None):
        if self.wait_error is not None:
            raise self.wait_error
        if on_wait is not None:
            on_wait({})

    def take_evaluation(self):
        rows = {name: [row(self.reward, 0), row(0.0, 0)] for name in self.begun[-1]}
        return rows | {name: error for name, error in self.fails.items() if name in rows}


class Run:
    """One start of a run in a directory."""

    def __init__(self, run_dir, settings=("one", "two")):
        self.notes, self.source = [], Source()
        display = RunDisplay(1, enabled=False)
        display.note = lambda text, style="": self.notes.append(text)
        sets = [SimpleNamespace(name=name, num_samples=1) for name in ("a", "b")]
        self.metrics = MetricsWriter(run_dir, False)
        fingerprints = dict(zip(("a", "b"), settings))
        self.evaluations = Evaluations(sets, fingerprints, self.metrics, display)

    def evaluate(self, version, **how):
        self.evaluations.begin(self.source, version, **how)
        self.evaluations.end(self.source)


def versions(run_dir):
    return [(line["step"], line["name"]) for line in read_evaluations(run_dir)]


def test_rows_and_numbers_of_every_set_and_version_are_on_disk(tmp_path):
    run = Run(tmp_path)
    run.evaluate(0, at_start=True)
    run.evaluate(5)
    assert versions(tmp_path) == [(0, "a"), (0, "b"), (5, "a"), (5, "b")]
    assert sorted(p.name for p in (tmp_path / "eval").iterdir()) == [
        "0000000-a.jsonl",
        "0000000-b.jsonl",
        "0000005-a.jsonl",
        "0000005-b.jsonl",
        "metrics.jsonl",
    ]
    rows = (tmp_path / "eval" / "0000005-b.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in rows] == [row(1.0, 0), row(0.0, 0)]
    (line,) = [x for x in read_evaluations(tmp_path) if (x["step"], x["name"]) == (5, "b")]
    assert line["eval/b/mean"] == 0.5 and line["eval/b/pass_at_1"] == 0.5
    assert "weight version 5 on b: 0.500 ± 0.500, pass@1 0.500" in run.notes[-1]


def test_a_resumed_run_evaluates_its_first_version_once_and_later_ones_anew(tmp_path):
    """Later versions of the first start are of weights that are lost."""
    Run(tmp_path).evaluate(4)
    resumed = Run(tmp_path)
    resumed.evaluate(4, at_start=True)
    assert resumed.source.begun == []
    Run(tmp_path).evaluate(6)
    resumed.source.reward = 0.5
    resumed.evaluate(6)
    assert resumed.source.begun == [["a", "b"]]
    (line,) = [x for x in read_evaluations(tmp_path) if (x["step"], x["name"]) == (6, "a")]
    assert line["eval/a/mean"] == 0.25, "the later line counts"


def test_a_resume_evaluates_what_is_missing_and_what_was_asked_in_another_way(tmp_path):
    Run(tmp_path).evaluate(4)
    (tmp_path / "eval" / "0000004-a.jsonl").unlink()  # a crash before its rows were complete
    resumed = Run(tmp_path)
    resumed.evaluate(4, at_start=True)
    assert resumed.source.begun == [["a"]]
    changed = Run(tmp_path, settings=("one", "another temperature"))
    changed.evaluate(4, at_start=True)
    assert changed.source.begun == [["b"]]


def test_a_set_that_fails_is_named_and_the_others_are_written(tmp_path):
    run = Run(tmp_path)
    run.source.fails = {"a": ValueError("prompt p:3: reward math raised")}
    run.evaluate(2)
    assert versions(tmp_path) == [(2, "b")]
    assert run.notes[0] == (
        "warning: weight version 2 was not evaluated on a: prompt p:3: reward math raised"
    )


@pytest.mark.parametrize("error", [StopRequested("SIGTERM"), RuntimeError("a server died")])
def test_a_stop_and_a_lost_server_end_the_wait_and_keep_what_is_complete(tmp_path, error):
    run = Run(tmp_path)
    run.source.wait_error, run.source.fails = error, {"a": EvaluationEnded("given up")}
    run.evaluate(2)
    assert versions(tmp_path) == [(2, "b")]
    assert str(error) in run.notes[0] and "not evaluated on a" in run.notes[0]
    run.evaluations.end(run.source)  # nothing is under way any more


def test_a_watched_source_ends_the_wait_at_a_signal():
    stop = SimpleNamespace(received=None)
    watched = WatchedSource(Source(), stop, None)
    watched.await_evaluation()
    stop.received = "SIGUSR1"
    with pytest.raises(StopRequested, match="SIGUSR1"):
        watched.await_evaluation()


def test_the_summary_names_the_first_and_the_last_evaluation(tmp_path):
    run = Run(tmp_path)
    run.evaluate(0)
    assert summarise_evaluations(tmp_path)["evaluation of a"] == "0.500 ± 0.500 (version 0)"
    run.source.reward = 0.5
    run.evaluate(9)
    assert summarise_evaluations(tmp_path)["evaluation of a"] == (
        "0.500 ± 0.500 (version 0) -> 0.250 ± 0.250 (version 9)"
    )

"""Saves and exports of the run state, its words at the end of a run, and waits that a stop ends."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from r3train.generation.buffer import ProducerState
from r3train.loop import run_state as module
from r3train.loop import prompt_log
from r3train.loop.outcome import POLICIES
from r3train.loop.run_state import BUFFER_FILE, CONFIG_FILE, WatchedSource
from r3train.loop.rollout_file import HAS_BUFFER, TEMPERATURE, read_samples
from r3train.loop.stop import StopRequested
from tests.unit.config.test_config import config
from tests.unit.loop.test_run_state import run_state_of
from tests.unit.loop.test_rollout_file import groups, scored


class Calls:
    """A checkpointer that notes its calls, and writes what the run state adds."""

    def __init__(self, directory):
        self.directory, self.calls, self.facts = directory, [], None

    def poll(self):
        self.calls.append("poll")

    def save(self, number, facts, write_extra):
        self.calls.append(("save", number))
        self.facts = facts
        if write_extra is not None:
            write_extra(self.directory)

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def told():
    return []


@pytest.fixture
def run_state(tmp_path, told):
    """A run_state that saves every second rollout, and exports then."""
    prompts = tmp_path / "data.jsonl"
    prompts.write_text("one\n")
    settings = config(save=tmp_path / "saved", save_interval=2, rollout_temperature=0.7)
    run_state = run_state_of(tmp_path, prompts, told, Calls(tmp_path), settings)
    run_state.export = lambda rollout_id: run_state.checkpointer.calls.append(
        ("export", rollout_id)
    )
    return run_state


@pytest.mark.parametrize(
    "next_rollout_id, options, expected",
    [
        (3, {"goes_on": True}, []),
        (4, {"goes_on": True}, [("save", 4), ("export", 4)]),
        (4, {"goes_on": False}, [("save", 4)]),
        (3, {"goes_on": True, "now": True}, [("save", 3)]),
        (3, {"goes_on": False, "now": True}, [("save", 3)]),
        (4, {"goes_on": True, "now": True}, [("save", 4), ("export", 4)]),
    ],
)
def test_the_interval_saves_and_exports_and_now_saves_alone(
    run_state, next_rollout_id, options, expected
):
    run_state.save_due(next_rollout_id, **options)
    assert run_state.checkpointer.calls == ["poll", *expected]


def test_a_run_without_save_exports_at_its_interval_all_the_same(run_state):
    exported, run_state.checkpointer = [], None
    run_state.export = exported.append
    for next_rollout_id in range(1, 5):
        run_state.save_due(next_rollout_id, goes_on=True)
    assert exported == [2, 4]


def test_without_an_interval_nothing_is_due(tmp_path, told, run_state):
    run_state.config = config(save=tmp_path / "saved")
    for next_rollout_id in (0, 1, 2):
        run_state.save_due(next_rollout_id, goes_on=True)
    assert run_state.checkpointer.calls == ["poll"] * 3


@pytest.mark.parametrize("signal_here", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_a_stop_is_saved_in_full_before_it_counts_as_saved(
    run_state, told, tmp_path, saves, signal_here
):
    calls = run_state.checkpointer.calls
    if not saves:
        run_state.checkpointer = None
    run_state.stop = SimpleNamespace(received="SIGUSR1" if signal_here else None, saved=None)
    run_state.save_stopped(5)
    assert calls == ([("save", 5), "finish"] if saves else [])
    assert run_state.stop.saved is saves
    name = "SIGUSR1" if signal_here else "a signal to another rank"
    kept = f"a checkpoint was saved, and --load {tmp_path / 'saved'} goes on from it"
    kept = kept if saves else "nothing was saved: no --save"
    assert told == [f"stopped by {name} after 5 rollouts; {kept}"]


@pytest.mark.parametrize("saves", [True, False])
def test_a_failure_says_whether_a_checkpoint_was_saved(run_state, told, saves):
    calls = run_state.checkpointer.calls
    if not saves:
        run_state.checkpointer = None
    run_state.save_failed(5, "no room", "a rollout could not be scored")
    assert calls == ([("save", 5), "finish"] if saves else [])
    kept = "a checkpoint was saved" if saves else "nothing was saved: no --save"
    assert told == [f"a rollout could not be scored after 5 rollouts; {kept}: no room"]


def test_a_run_that_learns_nothing_saves_after_its_last_rollout(run_state, tmp_path):
    run_state.config = config(min_ess=0.5, max_bad_steps=1, max_weight_staleness=0)
    error = run_state.learned_nothing(7, run_state.config.steps_per_rollout)
    assert isinstance(error, RuntimeError) and "rollout 7: 1 rollouts in a row" in str(error)
    run_state.save_failed(8, str(error), POLICIES["nothing trained"].what)
    assert run_state.checkpointer.calls == [("save", 8), "finish"]


def waiting(samples):
    facts = {"next_step": 5, "groups": []}
    return SimpleNamespace(snapshot=lambda: samples and ProducerState(samples, facts))


def test_rank_0_saves_the_facts_the_configuration_and_samples_with_their_routes(
    run_state, tmp_path
):
    samples, run_state.run_facts = scored(), {"lora": None}
    asked = []
    run_state.with_routes = lambda sample: asked.append(sample.sample_id) or sample
    run_state.watch(waiting(samples))
    run_state.save(5)
    assert run_state.checkpointer.facts == {
        "run": {"lora": None},
        HAS_BUFFER: True,
        "run_dir": str(tmp_path.resolve()),
    }
    assert (tmp_path / CONFIG_FILE).read_text() == run_state.config.to_toml()
    assert asked == [sample.sample_id for sample, _ in samples]
    read, facts = read_samples(tmp_path / BUFFER_FILE)
    assert len(read) == len(samples) and facts[TEMPERATURE] == 0.7


def test_of_a_complete_checkpoint_the_buffer_alone_is_replaced(run_state, tmp_path):
    (tmp_path / CONFIG_FILE).write_text("as it was")
    run_state.watch(waiting(scored()))
    run_state.save(5)
    assert (tmp_path / CONFIG_FILE).read_text() == "as it was"
    assert (tmp_path / BUFFER_FILE).is_file()


def test_a_source_without_state_has_no_buffer_and_another_rank_writes_nothing(run_state, tmp_path):
    run_state.save(5)
    assert run_state.checkpointer.facts == {"run": {}, "run_dir": str(tmp_path.resolve())}
    assert not (tmp_path / CONFIG_FILE).exists()
    run_state.watch(waiting(None))
    run_state.save(5)
    assert run_state.checkpointer.facts[HAS_BUFFER] is False
    assert (tmp_path / CONFIG_FILE).exists() and not (tmp_path / BUFFER_FILE).exists()


def test_skipped_steps_are_in_the_log_of_prompts_and_their_batch_has_its_routes(
    run_state, tmp_path
):
    asked = []
    run_state.with_routes = lambda sample: asked.append(sample.sample_id) or sample
    run_state.watch(SimpleNamespace(next_batch=lambda step, on_wait: groups())).next_batch(0)
    run_state.count_trained(0, 0)
    assert asked == []
    run_state.count_trained(1, 2)
    assert sorted(asked) == [0, 1, 2, 3]
    lines = (tmp_path / prompt_log.FILE).read_text().splitlines()
    assert [json.loads(line)["skipped_steps"] for line in lines] == [0, 2]


class Waiting:
    """A source that waits once for a batch, and once for an evaluation."""

    def next_batch(self, _rollout_id, on_wait):
        on_wait({"finished": 3})
        return groups()

    def await_evaluation(self, on_wait):
        on_wait({})


@pytest.mark.parametrize("wait", ["next_batch", "await_evaluation"])
def test_a_signal_to_another_rank_and_a_silent_rank_end_a_wait(monkeypatch, wait):
    source = WatchedSource(Waiting(), SimpleNamespace(received=None), None)

    def go():
        source.next_batch(0) if wait == "next_batch" else source.await_evaluation()

    go()
    monkeypatch.setattr(module, "stop_noted", lambda: True)
    with pytest.raises(StopRequested, match="a signal to another rank"):
        go()

    def silent():
        raise RuntimeError("another rank does not answer")

    monkeypatch.setattr(module, "require_ranks", silent)
    with pytest.raises(RuntimeError, match="does not answer"):
        go()


def test_who_waits_for_a_batch_is_told_of_its_progress():
    seen = []
    source = WatchedSource(Waiting(), SimpleNamespace(received=None), None)
    assert source.next_batch(0, seen.append) is source.last
    assert seen == [{"finished": 3}]


@pytest.mark.parametrize("dumps", [True, False])
def test_a_dumped_rollout_has_its_routes_and_is_dumped_only_if_asked_for(
    run_state, tmp_path, dumps
):
    run_state.config, asked = config(dump_rollouts=dumps), []
    run_state.with_routes = lambda sample: asked.append(sample.sample_id) or sample
    run_state.watch(SimpleNamespace(next_batch=lambda step, on_wait: groups())).next_batch(0)
    assert sorted(asked) == ([0, 1, 2, 3] if dumps else [])
    assert (tmp_path / "rollouts").exists() is dumps

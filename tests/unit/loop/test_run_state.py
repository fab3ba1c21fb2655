"""Stops, bad steps, accounts of prompts, and the file of prompts."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.data.file_fingerprint import FileFingerprint
from r3train.data.order import PromptOrder
from r3train.engine.backend import SamplingParams
from r3train.generation.buffer import ProducerState
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings
from r3train.host_group import join_ranks, leave_ranks
from r3train.loop import prompt_log
from r3train.loop.async_loop import AsyncLoop
from r3train.loop.run_evaluations import Evaluations
from r3train.loop.run_state import BUFFER_FILE, RunState, WatchedSource
from r3train.loop.rank_zero import RankZero
from r3train.loop.replay_source import Conversations
from r3train.loop.rollout_file import read_samples
from r3train.loop.route_transport import RoutesOnRank0
from r3train.loop.stop import SIGNALS, StopRequested, StopSignal
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter
from r3train.trainer.megatron.write_results import WriteResults
from r3train.types import RankTopology
from tests.unit.config.test_config import config
from tests.unit.loop.test_rollout_file import groups
from tests.fakes.server import SimulatedEngine, prompt_for


@contextmanager
def begun(stop: StopSignal) -> Iterator[StopSignal]:
    """Handle signals as a run does, and put pytest's handlers back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop.begin()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_noted_and_ends_the_wait_for_a_rollout(number, request):
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    request.addfinalizer(lambda: signal.signal(number, before))

    class Waiting:
        def next_batch(self, step, on_wait):
            on_wait({})
            os.kill(os.getpid(), number)
            on_wait({})

        def stats(self):
            return "its own"

    with begun(StopSignal(grace_s=60)) as stop:
        source = WatchedSource(Waiting(), stop, None)
        assert source.stats() == "its own"
        assert stop.received is None and stop.exit_code(saved=False) == 0
        with pytest.raises(StopRequested):
            source.next_batch(0)
        assert stop.received == number.name
        assert stop.exit_code(saved=True) == 0 and stop.exit_code(saved=False) == 128 + number
    stop._timer.cancel()  # pytest goes on


def test_a_signal_after_the_last_step_is_no_stop():
    with begun(StopSignal(grace_s=60)) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == "SIGTERM"  # and then the last step ends
        stop.finished = True
        assert stop.received is None and stop.exit_code(saved=False) == 0
    stop._timer.cancel()  # pytest goes on


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with begun(StopSignal(grace_s=60)) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_the_grace_period_the_process_ends_whatever_it_does():
    child = os.fork()
    if child == 0:
        with begun(StopSignal(grace_s=0.2)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_signal_to_a_forked_writer_ends_the_writer_alone():
    child = os.fork()
    if child == 0:
        with begun(StopSignal(grace_s=0.2)):
            writer = os.fork()
            if writer == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(20)
            code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
            time.sleep(1.5)
        os._exit(10 + code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11


def test_a_second_ctrl_c_ends_the_process_at_once_and_one_that_torchrun_passes_on_does_not():
    forked = time.monotonic()
    child = os.fork()
    if child == 0:
        with begun(StopSignal(grace_s=60)):
            began = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            while time.monotonic() < began + 2.2:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGINT
    assert time.monotonic() > forked + 2.2, "the one that was passed on ended it"


@pytest.mark.parametrize("saved", [False, True])
def test_what_closes_after_the_loop_has_the_grace_period_too(saved):
    """A run that has saved is not lost by what hangs after: a batch job goes back into the queue at 0."""
    child = os.fork()
    if child == 0:
        with begun(StopSignal(grace_s=0.5)) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        stop.saved = saved
        time.sleep(20)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if saved else 1)


def test_bad_steps_are_dumped_counted_and_end_the_run_only_in_a_row(tmp_path):
    path, told = tmp_path / "data.jsonl", []
    path.write_text("one\n")
    run_state = run_state_of(tmp_path, path, told, config=config(max_bad_steps=2))
    run_state.watch(SimpleNamespace(next_batch=lambda step, on_wait: groups())).next_batch(0)
    assert run_state.count_trained(0, 1) is None
    assert (tmp_path / "bad_steps" / "rollout_0000000.safetensors").exists()
    assert run_state.count_trained(1, 0) is None
    assert run_state.count_trained(2, 1) is None
    error = run_state.count_trained(3, 1)
    assert isinstance(error, FloatingPointError) and "2 in a row" in str(error)
    dumped = ["bad_steps/rollout_" in line for line in told]
    assert dumped == [True] * 3, "of rollouts 0, 2 and 3"


@pytest.mark.parametrize("staleness, most", [(1, 3), (4, 5)])
def test_rollouts_in_a_row_that_min_ess_skips_end_the_run(tmp_path, staleness, most):
    run_state = RunState(
        config(min_ess=0.5, global_batch_size=8, max_weight_staleness=staleness),
        tmp_path,
        run_facts={},
        prompt_file=None,
        stop=None,
        checkpointer=None,
        note=print,
        with_routes=None,
    )
    for rollout_id in range(most - 1):
        assert run_state.learned_nothing(rollout_id, 2) is None
    # one of two steps was made: the row ends
    assert run_state.learned_nothing(most, 1) is None
    for rollout_id in range(most - 1):
        assert run_state.learned_nothing(rollout_id, 2) is None
    error = run_state.learned_nothing(9, 2)
    assert isinstance(error, RuntimeError)
    assert re.match(rf"rollout 9: {most} rollouts in a row .* 0\.5", str(error))


def test_the_account_of_prompts_counts_the_later_line_of_a_step(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    one, two = groups()
    prompt_log.append(first, 0, [one], 0)
    prompt_log.append(first, 1, [two], 0)
    prompt_log.append(second, 1, [two], 0)
    records = prompt_log.read([first, second])
    assert [r["prompt_ids"] for r in records] == [["p0"], ["p1"]]
    assert not any(prompt_log.faults(records).values())


def test_the_audit_finds_what_is_lost_and_what_is_doubled(tmp_path):
    one, _ = groups()
    prompt_log.append(tmp_path, 0, [one], 0)
    prompt_log.append(tmp_path, 2, [one], 0)
    with (tmp_path / prompt_log.FILE).open("a") as file:
        file.write('{"step": 3, "cut')
    assert prompt_log.faults(prompt_log.read([tmp_path])) == {
        "missing_steps": [1],
        "groups_twice": [0],
        "samples_twice": [0, 1],
    }


def test_a_prompt_file_counts_as_changed_by_its_content_alone(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("one")
    mark = FileFingerprint.of(path)
    assert not mark.changed()
    path.write_text("one")  # touched, the same
    assert not mark.changed()
    path.write_text("two")
    assert mark.changed()
    path.unlink()
    assert mark.changed()


def test_a_forked_writer_hands_its_parent_one_result_of_any_size():
    results = WriteResults()
    with pytest.raises(Empty):
        results.get_nowait()
    content = {0: ["x" * 500_000]}  # more than a pipe holds
    child = os.fork()
    if child == 0:
        results.put("an earlier one, longer than nothing")
        results.put(content)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert results.get_nowait() == content
    with pytest.raises(Empty):
        results.get_nowait()


def run_state_of(directory, prompt_file, told, checkpointer=None, config=None) -> RunState:
    return RunState(
        config or RunConfig.from_toml("configs/tiny_cpu.toml"),
        directory,
        run_facts={},
        sample_facts={"reward": "of the run"},
        prompt_file=FileFingerprint.of(prompt_file),
        stop=StopSignal(60),
        checkpointer=checkpointer,
        note=told.append,
        with_routes=lambda sample: sample,
    )


def test_a_prompt_file_that_changes_under_the_run_is_told_of_once(tmp_path):
    path, told = tmp_path / "data.jsonl", []
    path.write_text("one\n")
    run_state = run_state_of(tmp_path, path, told)
    run_state.watch(SimpleNamespace(next_batch=lambda step, on_wait: [groups()[0]])).next_batch(0)
    run_state.count_trained(0, 0)
    assert told == []
    path.write_text("one\ntwo\n")
    run_state.count_trained(1, 0)
    run_state.count_trained(2, 0)
    assert len(told) == 1 and "the prompt file has changed since the run began" in told[0]


def test_a_save_that_fails_after_generation_failed_does_not_hide_why_it_did(tmp_path):
    class FullDisk:
        def save(self, *_):
            raise OSError(28, "No space left on device")

    path, told = tmp_path / "data.jsonl", []
    path.write_text("one\n")
    with pytest.raises(OSError, match="No space left"):
        run_state_of(tmp_path, path, told, FullDisk()).save_failed(7, "the server died")
    assert told == ["generation failed after 7 rollouts: the server died"]


def test_conversations_are_drawn_by_the_rollouts_number_alone():
    samples = [scored[0] for group in groups() for scored in group]
    order = PromptOrder(len(samples), seed=3)
    source = Conversations(samples, order, num_groups=3)
    first, second = source.next_batch(0), source.next_batch(1)
    sampled = [sample for group in [*first, *second] for sample, reward in group if reward == 0]
    assert [s.sample_id for s in sampled] == [s.group_id for s in sampled] == list(range(6))
    texts = [s.token_ids.tolist() for s in sampled]
    assert texts == [samples[i].token_ids.tolist() for i in map(order.index, range(6))]
    (again,) = Conversations(samples, order, num_groups=3).next_batch(1)[:1]  # as after a resume
    assert again[0][0].sample_id == 3 and again[0][0].token_ids.tolist() == texts[3]


class Writes:
    """A checkpointer that writes what stands next to the tensors."""

    def __init__(self, directory):
        self.directory, self.saved_at = directory, []

    def save(self, next_rollout_id, facts, write_extra):
        write_extra(self.directory)
        self.saved_at.append(next_rollout_id)

    def finish(self):
        pass


class Remembers(Producer):
    """A producer that keeps the last batch that it gave."""

    def next_batch(self, *arguments):
        self.given = super().next_batch(*arguments)
        return self.given


GUEST = "tests.unit.faulty_user_code:"
SCORED = "a rollout could not be scored"


@pytest.mark.parametrize(
    "setting, place, error, said",
    [
        (
            "advantage_estimator",
            f"{GUEST}advantages_exit",
            f"^--advantage-estimator {GUEST}advantages_exit: raised SystemExit: 0 .faulty_user_code.py:",
            SCORED,
        ),
        (
            "advantage_estimator",
            f"{GUEST}advantages_fail",
            f"^--advantage-estimator {GUEST}advantages_fail: raised KeyError: 'gold' .faulty_user_code.py:",
            SCORED,
        ),
        ("dump_rollouts", True, "rollouts'$", "generation failed"),
        (
            "ci_inject_rollout_data_path",
            "no such directory",
            "rollout_0000000.safetensors: cannot read the samples: No such file or directory$",
            "generation failed",
        ),
    ],
    ids=["estimator exits", "estimator raises", "dump fails", "recording is missing"],
)
def test_a_rollout_that_cannot_be_scored_dumped_or_replaced_waits_in_a_checkpoint(
    tiny, tmp_path, setting, place, error, said
):
    """The loop, the run state and the producer are the job's own; actor and servers are not needed yet."""
    (tmp_path / "rollouts").write_text("where dumps would go")
    settings = config(
        hf_checkpoint=tiny / "model",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        num_rollout=4,
        **{setting: place},
    )
    engine, told, checkpointer = SimulatedEngine(), [], Writes(tmp_path)

    def producer(engine, state=None):
        rollout, sampling = settings.rollout, SamplingParams(20)
        return Remembers(
            rollout, lambda: engine, prompt_for, RequestSettings(sampling), state=state
        )

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("one\n")
    made = producer(engine)
    side = SimpleNamespace(start_producer=lambda: made, route_wire_bytes=lambda: 0)
    display = RunDisplay(4, enabled=False)
    hf, metrics = read_hf_facts(tiny / "model"), MetricsWriter(tmp_path, False)
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    try:
        loop = AsyncLoop(
            settings,
            hf,
            SimpleNamespace(topology=RankTopology()),
            rank_zero=RankZero(
                None, None, side, display, metrics, Evaluations([], {}, metrics, display)
            ),
            evidence=None,
            run_state=run_state_of(tmp_path, prompts, told, checkpointer, settings),
            routes=RoutesOnRank0(None, ()),
        )
        with pytest.raises((ValueError, OSError), match=error) as raised:
            loop.run(0)
        made.close()
    finally:
        leave_ranks()
    assert checkpointer.saved_at == [0]
    (line,) = told
    assert line.startswith(f"{said} after 0 rollouts; a checkpoint was saved")
    assert str(raised.value) in line
    untrained = [s for group in made.given for s, _ in group]
    resumed, state = SimulatedEngine(), ProducerState(*read_samples(tmp_path / BUFFER_FILE))
    assert state.facts["reward"] == "of the run"  # by which a resume finds another one
    with producer(resumed, state) as again:
        batch = [s for group in again.next_batch(0) for s, _ in group]
    assert [s.token_ids.tolist() for s in batch] == [s.token_ids.tolist() for s in untrained]
    asked = {sample_id for sample_id, _, _ in resumed.asked}
    assert len(batch) == 4 and not asked & {s.sample_id for s in batch}, "generated again"

"""Samples in files name the temperature of their log-probs: a run at another one refuses them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from r3train.config import RunConfig
from r3train.launch.job import resume
from r3train.launch.job.resume import unknown_temperature
from r3train.launch.start.rollouts import build_rollouts
from r3train.loop.run_state import BUFFER_FILE
from r3train.loop.replay_source import dump_rollout, load_rollout
from r3train.loop.rollout_file import read_facts, read_samples, write_samples
from r3train.loop.rollouts_only import generate_only
from r3train.loop.stop import StopSignal
from r3train.generation.buffer import ProducerState
from r3train.trainer.megatron.saved_state import LATEST, STATE
from tests.unit.loop.test_run_state import run_state_of
from tests.unit.loop.test_rollout_file import groups, injecting, scored, source

RECIPE = "configs/tiny_cpu.toml"


class Checkpoints:
    """Writes what the run state adds to a checkpoint, and the state that a resume reads."""

    def __init__(self, directory):
        self.directory = directory

    def save(self, number, facts, write_extra):
        path = self.directory / f"iter_{number:07d}"
        path.mkdir(parents=True)
        write_extra(path)
        state = {"num_rollouts": number, "weight_version": number, "topology": {"world_size": 1}}
        (path / STATE).write_text(json.dumps(state | facts))
        (self.directory / LATEST).write_text(str(number))


def waiting(samples):
    """The producer's facts of samples that wait, all of one prompt."""
    places = [[place, 1] for place in range(len(samples))]
    group = {"group_id": 0, "prompt_id": "p0", "attempt": 0, "places": places}
    return {"next_step": 5, "groups": [group] if samples else []}


def saved(directory, samples, temperature):
    """Save a checkpoint at rollout 5 in which ``samples`` wait, as a job at this temperature does."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("one\n")
    config = RunConfig.from_toml(RECIPE, {"rollout_temperature": temperature})
    run_state = run_state_of(directory, prompts, [], Checkpoints(directory), config)
    run_state.run_facts = {"lora": None}
    run_state.watch(SimpleNamespace(snapshot=lambda: ProducerState(samples, waiting(samples))))
    run_state.save(5)
    return directory / "iter_0000005" / BUFFER_FILE


def resumed(directory, temperature):
    config = RunConfig.from_toml(RECIPE, {"rollout_temperature": temperature, "load": directory})
    point = resume.resume_point(SimpleNamespace(config=config, prompt_file=None))
    return point, unknown_temperature(config, point)


@pytest.mark.parametrize("now", [0.4, 1.5])
def test_a_run_does_not_resume_at_another_temperature_than_its_waiting_samples(now, tmp_path):
    saved(tmp_path, scored(routes=False), 1.0)
    said = f"{BUFFER_FILE}: .* at temperature 1.0, and --rollout-temperature is {now}: resume with"
    with pytest.raises(ValueError, match=said):
        resumed(tmp_path, now)
    point, warning = resumed(tmp_path, 1.0)
    assert point.start_rollout_id == 5 and warning is None
    facts = waiting(scored(routes=False))
    of_run = {"rollout_temperature": 1.0, "reward": "of the run"}
    assert point.buffer(99)[1] == facts | of_run


def test_a_run_in_which_nothing_waits_resumes_at_any_temperature(tmp_path):
    saved(tmp_path, [], 1.0)
    assert resumed(tmp_path, 0.4)[0].start_rollout_id == 5


def test_an_older_file_of_waiting_samples_is_loaded_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("r3train.loop.run_state.TEMPERATURE", "of no interest")
    path = saved(tmp_path, scored(routes=False), 1.0)
    point, warning = resumed(tmp_path, 0.4)
    assert point.start_rollout_id == 5 and len(point.buffer(99)[0]) == 4
    assert str(path) in warning and "trained as sampled at --rollout-temperature 0.4" in warning


def test_rollouts_that_are_dumped_name_their_temperature(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("one\n")
    config = RunConfig.from_toml(RECIPE, {"rollout_temperature": 0.7, "dump_rollouts": True})
    run_state = run_state_of(tmp_path, prompts, [], config=config)
    inner = SimpleNamespace(next_batch=lambda rollout_id, on_wait: groups())
    run_state.watch(inner).next_batch(3)
    facts = read_facts(tmp_path / "rollouts/rollout_0000003.safetensors")
    assert facts == read_samples(tmp_path / "rollouts/rollout_0000003.safetensors")[1]
    assert facts["rollout_temperature"] == 0.7 and facts["rollout_id"] == 3


def replayed(directory, told, **settings):
    """The source of a job that replays a directory, as the training command makes it."""
    options = {"replay_rollouts": directory, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    config = RunConfig.from_toml(RECIPE, options | settings)
    display = SimpleNamespace(note=lambda text, style="": told.append(text))
    job = SimpleNamespace(config=config, hf=SimpleNamespace(vocab_size=99, index_topk=None))
    return build_rollouts(job, None, display, resume.ResumePoint()).start_producer()


def test_a_replay_refuses_rollouts_of_another_temperature(tmp_path):
    told = []
    dump_rollout(tmp_path, 0, groups(), 0.7)
    said = "rollout_0000000.safetensors: .* at temperature 0.7, and --rollout-temperature is 1.0: train"
    with pytest.raises(ValueError, match=said):
        replayed(tmp_path, told).next_batch(0)
    assert len(replayed(tmp_path, told, rollout_temperature=0.7).next_batch(0)) == 2
    with pytest.raises(ValueError, match=said):
        injecting(tmp_path, groups()).next_batch(0)
    assert len(injecting(tmp_path, groups(), temperature=0.7).next_batch(0)) == 2
    # fine-tuning reads no log-probs of the engine
    assert len(replayed(tmp_path, told, loss_type="sft").next_batch(0)) == 2
    assert told == []


def test_older_rollouts_are_replayed_with_one_warning(tmp_path):
    told = []
    for number in range(2):
        dump_rollout(tmp_path, number, groups())
    dumped = replayed(tmp_path, told)
    assert len(dumped.next_batch(0)) == len(dumped.next_batch(1)) == 2
    (line,) = told
    assert "rollout_0000000.safetensors does not name the temperature" in line
    assert len(source(tmp_path).next_batch(0)) == 2


def test_a_batch_of_a_bad_step_names_its_temperature(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("one\n")
    config = RunConfig.from_toml(RECIPE, {"rollout_temperature": 0.7})
    run_state = run_state_of(tmp_path, prompts, [], config=config)
    run_state.watch(SimpleNamespace(next_batch=lambda rollout_id, on_wait: groups())).next_batch(0)
    run_state.count_trained(0, skipped=1)
    facts = read_facts(tmp_path / "bad_steps/rollout_0000000.safetensors")
    assert facts["rollout_temperature"] == 0.7


def test_rollouts_without_training_name_their_temperature(tmp_path):
    settings = {"rollout_temperature": 0.7, "num_rollout": 1, "debug_rollout_only": True}
    config = RunConfig.from_toml(RECIPE, settings)
    made = SimpleNamespace(next_batch=lambda rollout_id, on_wait: groups(), stats=dict)
    rank_zero = SimpleNamespace(
        rollouts=SimpleNamespace(start_producer=lambda: made),
        servers=SimpleNamespace(fault_counts=dict),
        display=SimpleNamespace(step_line=lambda metrics: None),
        metrics=SimpleNamespace(write=lambda *_: None, write_samples=lambda *_: None),
        next_groups=lambda source, number, count: source.next_batch(number),
    )
    generate_only(config, tmp_path, rank_zero, StopSignal(60))
    facts = read_facts(tmp_path / "rollouts/rollout_0000000.safetensors")
    assert facts["rollout_temperature"] == 0.7


def test_a_start_from_the_weights_alone_has_nothing_to_warn_of(tmp_path, monkeypatch):
    monkeypatch.setattr("r3train.loop.run_state.TEMPERATURE", "of no interest")
    saved(tmp_path, scored(routes=False), 1.0)
    settings = {"rollout_temperature": 0.4, "load": tmp_path, "load_model_only": True}
    config = RunConfig.from_toml(RECIPE, settings)
    point = resume.resume_point(SimpleNamespace(config=config, prompt_file=None))
    assert point.model_only and unknown_temperature(config, point) is None


@pytest.mark.parametrize("sizes", [[2, 1], [2, 2, 1], [], None])
def test_a_rollout_whose_groups_are_not_its_samples_is_refused(sizes, tmp_path):
    facts = {"rollout_id": 0, "group_sizes": sizes}
    write_samples(tmp_path / "rollout_0000000.safetensors", scored(), facts)
    with pytest.raises(ValueError, match="does not hold rollout 0 in whole groups"):
        load_rollout(tmp_path, 0)

"""Seconds of generation: measured where the answer is waited for, summed over a rollout's parts."""

from __future__ import annotations

import asyncio
import time
import json
from dataclasses import replace

import numpy as np
from safetensors.numpy import save_file
from safetensors import safe_open

from r3train.loop.step_metrics import samples_to_report, rollout_metrics, source_metrics
from r3train.loop import rollout_file
from r3train.loop.rollout_file import read_samples, write_samples
from r3train.algo.reward_stats import GroupStats
from r3train.engine.backend import SamplingParams
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings, Episodes
from r3train.engine.backend import Drafts
from r3train.generation.shared import Counts
from r3train.types import TrainSample
from tests.fakes.server import SimulatedEngine, prompt_for, rollout_section
from tests.unit.loop.test_rollout_file import scored


async def two_turns(generate, prompt, *, sampling, sample_id):
    """An episode that gives both its turns' states as samples."""
    first = await generate(None, 10)
    await asyncio.sleep(0.5)  # the environment's time is not generation's
    return [first, replace(await generate(first, 10), sample_id=sample_id + 1)], 0.0


def test_a_sample_says_how_long_it_was_waited_for_and_its_turns_add_up():
    engine = SimulatedEngine(length=lambda _: 20, slow=lambda sample_id: 1 + 9 * (sample_id > 0))
    began = time.monotonic()
    with Producer(
        rollout_section(num_rollout=1, rollout_batch_size=1),
        lambda: engine,
        prompt_for,
        RequestSettings(SamplingParams(40)),
        episodes=Episodes(make=lambda prompt: two_turns),
    ) as producer:
        (group,) = producer.next_batch(0)
        took = time.monotonic() - began
    quick, quick_whole, slow, whole = (sample for sample, _ in group)
    # ten ticks of 1 and of 10 ms; never less, and how much more is the machine's
    assert slow.generation_s >= 0.1 and quick.generation_s >= 0.01
    assert whole.generation_s >= slow.generation_s + 0.1
    assert max(quick_whole.generation_s, whole.generation_s) <= took - 0.5


def test_the_slowest_sample_of_a_step_is_noted_with_its_seconds():
    samples = [
        TrainSample(replace(s, generation_s=seconds), reward, np.zeros(s.num_tokens, np.float32))
        for (s, reward), seconds in zip(scored(), (0.5, 3.0, 0.25, 0.25))
    ]
    slowest = next(s for s in samples_to_report(samples) if s["kind"] == "slowest")
    assert slowest["generation_s"] == 3.0
    assert slowest["sample_id"] == samples[1].sample.sample_id
    groups = GroupStats(2, 0, mean=0, std=0, min=0, max=0, pass_at_k={})
    metrics = rollout_metrics(0, groups, samples)
    assert metrics["rollout/generation_s_mean"] == 1.0
    assert metrics["rollout/generation_s_max"] == 3.0


def test_the_seconds_of_rollout_are_those_with_a_request_in_flight_since_the_last_batch(
    monkeypatch,
):
    now = [100.0]
    monkeypatch.setattr("r3train.generation.shared.time.monotonic", lambda: now[0])
    counts, before = Counts(), {}
    seen = []
    for busy, idle in ((3.0, 1.0), (2.0, 0.0), (0.0, 4.0)):
        counts.change_in_flight(2)
        now[0] += busy
        counts.change_in_flight(-2)
        now[0] += idle
        stats = {**counts.stats(), "outcomes": {}, "buffered_groups": 0}
        seen.append(source_metrics(stats, before))
        before = stats
    assert [m["perf/rollout_s"] for m in seen] == [3.0, 2.0, 0.0]
    assert [m["perf/rollout_idle_share"] for m in seen] == [0.25, 0.0, 1.0]


def test_drafts_are_counted_from_the_answer_to_the_metrics_and_none_are_nothing():
    """Three answers, of which the second step's two made (6, 4, 2) and (3, 0, 1)."""
    counts = Counts()
    state = lambda: {**counts.stats(), "outcomes": {}, "buffered_groups": 0}  # noqa: E731
    counts.add(Drafts())
    assert not [key for key in source_metrics(state(), {}) if "spec" in key]
    counts.add(Drafts(30, 30, 10))
    before = state()
    counts.add(Drafts(6, 4, 2))
    counts.add(Drafts(3, 0, 1))
    metrics = source_metrics(state(), before)
    assert metrics["rollout/spec_accept_rate"] == 4 / 9
    assert metrics["rollout/spec_accept_length"] == 1 + 4 / 3


def test_a_file_from_before_the_field_is_read(tmp_path):
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {})
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    header = json.loads(metadata["header"])
    del header["samples"]["generation_s"]
    header["checksum"] = rollout_file.arrays_checksum(tensors)  # all that files of that time summed
    del metadata["checksum"]
    save_file(tensors, path, {**metadata, "header": json.dumps(header)})
    assert [s.generation_s for s, _ in read_samples(path)[0]] == [0.0] * 4

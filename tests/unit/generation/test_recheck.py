"""Samples that the servers compute again: the choice, and the time while they hold the weights."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.fakes.server import prompt_for, rollout_section, ROUTES, SimulatedEngine

from r3train.engine.backend import EngineError, SamplingParams
from r3train.generation.buffer import Group
from r3train.generation.producer import Producer
from r3train.generation.episode_task import RequestSettings, EpisodeTask
from r3train.generation.shared import Counts
from r3train.generation.recheck import Rechecking
from r3train.types import Rechecked

pytestmark = pytest.mark.usefixtures("virtual_clock")


class Engine(SimulatedEngine):
    """Computes texts again too; ``again_s`` seconds each, and ``broken`` ones not at all."""

    def __init__(self, *, again_s: float = 0.0, broken: bool = False, **how) -> None:
        super().__init__(**how)
        self.again_s, self.broken = again_s, broken
        self.rechecked: list[tuple[str, int, int, int, int]] = []
        self.at_once = self.at_most = 0
        self.held = 0  # requests for tokens that were sent before the noise was measured

    serves = 0  # the server that answers

    def servers(self):
        return [0]

    async def generate(self, request):
        return replace(await super().generate(request), server=self.serves)

    async def recheck(self, request, part, server=None):
        self.at_once += 1
        self.at_most = max(self.at_most, self.at_once)
        try:
            await asyncio.sleep(self.again_s)
        finally:
            self.at_once -= 1
        if self.broken:
            raise EngineError("no")
        count = len(request.token_ids) - 1 - request.rows_start
        facts = (part, request.sample_id, request.weight_version, self.version, request.rows_start)
        self.rechecked.append(facts)
        return Rechecked(
            sample_id=request.sample_id,
            part=part,
            server=server or 0,
            weight_version=request.weight_version,
            held_version=self.version,
            token_ids=request.token_ids,
            first_row=request.rows_start,
            rows=np.zeros((count, *ROUTES.row), ROUTES.dtype),
            log_probs=np.full(count, -1.0, np.float32),
        )

    async def score_twice(self, request, server):
        self.held += len(self.asked)
        sampled = await SimulatedEngine(length=lambda _: 4).generate(request)
        tokens = np.concatenate([request.token_ids, sampled.token_ids])
        again = await Engine().recheck(stitched(request, tokens), "whole", server)
        return sampled, again


def stitched(request, tokens):
    return replace(request, token_ids=tokens)


def producer(
    engine: Engine, share: float = 1.0, *, versions_stay: bool = False, **section
) -> Producer:
    return Producer(
        rollout_section(**section),
        lambda: engine,
        prompt_for,
        RequestSettings(SamplingParams(64), versions_stay=versions_stay),
        recheck_share=share,
    )


def chosen(share: float, groups: int = 64, **section) -> list[tuple[int, int]]:
    rollout = rollout_section(rollout_batch_size=8, n_samples_per_prompt=4, **section)
    rechecking = Rechecking(rollout, share, Counts())
    return [(g, place) for g in range(groups) for place in rechecking.chosen(g)]


def test_the_choice_is_random_the_same_again_and_at_least_one_a_rollout():
    few = chosen(0.01)
    assert Counter(g // 8 for g, _ in few) == dict.fromkeys(range(8), 1)
    assert few == chosen(0.01) != chosen(0.01, rollout_seed=7)
    assert len(set(few)) == 8 and len({(g % 8, place) for g, place in few}) > 4
    assert Counter(g // 8 for g, _ in chosen(0.25)) == dict.fromkeys(range(8), 8)
    assert len(chosen(1.0)) == 64 * 4


def test_every_sample_is_computed_again_under_its_own_version_and_none_is_held_up():
    engine = Engine()
    with producer(engine) as p:
        for rollout_id in range(4):
            groups = p.next_batch(rollout_id)
            rechecked = p.rechecked()
            ids = [sample.sample_id for group in groups for sample, _ in group]
            assert sorted(part.sample_id for part in rechecked.parts) == ids
            assert rechecked.missed == 0 and len(rechecked.noise) == 8
            assert all(part.part == "whole" and part.first_row == 0 for part in rechecked.parts)
            with p.quiesced():
                assert engine.at_once == 0  # the servers change their weights
                engine.version = rollout_id + 1
                p.set_version(rollout_id + 1)
    assert engine.held == 0, "the noise is measured before anything else is sent"
    assert engine.at_most == 1, "one at a time on a server"
    assert all(asked == held for _, _, asked, held, _ in engine.rechecked)


def test_a_server_that_joins_is_measured_before_it_first_computes_a_sample_again():
    engine = Engine()
    with producer(engine) as p:
        p.next_batch(0)
        assert {again.server for _, again in p.rechecked().noise} == {0}
        engine.serves = 3  # it has joined, and answers from now on
        for version in (1, 2):  # of which the first was generated before
            time.sleep(0.1)
            with p.quiesced():
                engine.version = version
                p.set_version(version)
            p.next_batch(version)
        noise = p.rechecked().noise
    assert [again.server for _, again in noise] == [0] * 8 + [3] * 8


def test_the_noise_of_servers_that_left_long_ago_is_dropped_and_that_of_one_that_stays_is_kept():
    engine, rechecking = Engine(), Rechecking(rollout_section(), 1.0, Counts())

    async def noise():
        for joined in range(1, 40):
            engine.servers = lambda: [0, joined]
            await rechecking.open(engine, [prompt_for(0)], SamplingParams(64), 0)
        return (await rechecking.rechecked_rollout([])).noise

    servers = Counter(again.server for _, again in asyncio.run(noise()))
    assert servers[0] == servers[39] == 8 and len(servers) < 12


class BusyEngine(Engine):
    """Measures server 3 only after so many updates, which cancel what is under way."""

    updates = 0

    async def score_twice(self, request, server):
        if server == 3 and self.version <= self.updates:
            await asyncio.Event().wait()
        return await super().score_twice(request, server)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_server_whose_measurement_was_cancelled_is_measured_by_a_later_recheck(updates):
    engine = BusyEngine()
    engine.updates, measured = updates, []
    with producer(engine, num_rollout=8) as p:
        p.next_batch(0)
        engine.serves = 3
        for version in range(1, updates + 4):
            time.sleep(0.1)
            with p.quiesced():
                engine.version = version
                p.set_version(version)
            p.next_batch(version)
            measured.append({again.server for _, again in p.rechecked().noise})
    assert measured[0] == {0} and measured[-1] == {0, 3}


def test_where_versions_stay_an_older_sample_is_computed_again_beside_newer_ones():
    engine = Engine(length=lambda _: 40)
    with producer(engine, versions_stay=True, max_weight_staleness=1) as p:
        while not engine.running:
            time.sleep(0.01)
        p.set_version(1)
        groups = p.next_batch(0)
        rechecked = p.rechecked()
    assert rechecked.missed == 0 and len(rechecked.parts) == sum(map(len, groups))
    assert {part.weight_version for part in rechecked.parts} == {0}


def test_several_samples_of_an_episode_are_one_that_was_computed_again():
    rollout = rollout_section(rollout_batch_size=1, n_samples_per_prompt=2)
    rechecking = Rechecking(rollout, 1.0, Counts(), samples_per_episode=4)
    none = np.zeros(0, np.int32)
    parts = [Rechecked(i, "whole", 0, 0, 0, none, 0, none, none) for i in (0, 1, 3)]
    groups = [Group(0, prompt_for(0), rechecked=parts)]
    assert asyncio.run(rechecking.rechecked_rollout(groups)).missed == 1
    parts.append(replace(parts[0], sample_id=4))  # of the other episode
    assert asyncio.run(rechecking.rechecked_rollout(groups)).missed == 0


def test_without_a_share_nothing_is_computed_again():
    with producer(Engine(), share=0.0) as p:
        p.next_batch(0)
        assert p.rechecked() is None


def test_what_takes_too_long_is_missed_and_holds_no_batch_up(monkeypatch):
    monkeypatch.setattr("r3train.generation.recheck.AWAITED_S", 0.2)
    engine = Engine(again_s=60)
    with producer(engine) as p:
        p.next_batch(0)
        rechecked = p.rechecked()
        assert (rechecked.parts, rechecked.missed) == ([], 4)


ONE = dict(rollout_batch_size=2, n_samples_per_prompt=2)


def the_chosen() -> int:
    """The sample that a share of a hundredth chooses of the first rollout."""
    rechecking = Rechecking(rollout_section(**ONE), 0.01, Counts())
    ((group, place),) = ((g, place) for g in range(2) for place in rechecking.chosen(g))
    return 2 * group + place


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort"])
def test_servers_that_generate_nothing_wait_for_a_share_of_the_time_alone(mode):
    """All rollouts that may be sent are complete: at an update the servers stand idle."""
    engine = Engine(again_s=3600)
    with producer(engine, 0.01, pause_generation_mode=mode, num_rollout=1, **ONE) as p:
        while p.stats()["finished_samples"] < 4 or p.stats()["in_flight"]:
            time.sleep(0.01)
        time.sleep(0.1)
        assert engine.at_once == 1
        with p.quiesced():
            assert engine.at_once == 0
            engine.version = 1
            p.set_version(1)
        p.next_batch(0)
        assert (p.rechecked().parts, p.rechecked().missed) == ([], 1)


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort"])
def test_at_an_update_texts_are_computed_again_while_tokens_are_generated_beside_it(mode):
    """One sample is long, and the chosen one takes longer than idle servers would wait for it."""
    chosen = the_chosen()
    engine = Engine(again_s=0.3, length=lambda i: 4 if i == chosen else 150, tick_s=0.01)
    with producer(engine, 0.01, pause_generation_mode=mode, num_rollout=1, **ONE) as p:
        while p.stats()["finished_samples"] < 1:
            time.sleep(0.002)
        with p.quiesced():
            assert engine.at_once == 0
            engine.version = 1
            p.set_version(1)
        p.next_batch(0)
        parts = [(part.sample_id, part.part) for part in p.rechecked().parts]
    assert (chosen, "whole") in parts


def test_a_larger_share_waits_longer_on_idle_servers():
    engine = Engine(again_s=0.3)
    with producer(engine, 1.0, num_rollout=1, **ONE) as p:
        while p.stats()["finished_samples"] < 4:
            time.sleep(0.01)
        time.sleep(0.6)
        with p.quiesced():
            engine.version = 1
            p.set_version(1)
        p.next_batch(0)
        assert len(p.rechecked().parts) >= 3


def test_an_engine_that_cannot_compute_again_ends_nothing():
    with producer(Engine(broken=True)) as p:
        p.next_batch(0)
        assert (p.rechecked().parts, p.rechecked().missed) == ([], 4)


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_of_a_sample_that_spans_an_update_only_what_one_version_computed(mode):
    """in_place builds on old keys and values: the prompt before it is all that can be had."""
    engine = Engine(length=lambda _: 40, tick_s=0.005)
    with producer(engine, pause_generation_mode=mode, max_weight_staleness=2) as p:
        while not any(asked[0] < 4 for asked in engine.asked):
            time.sleep(0.01)
        time.sleep(0.05)
        with p.quiesced():
            engine.version = 1
            p.set_version(1)
        groups = p.next_batch(0)
        parts = p.rechecked().parts
    samples = {sample.sample_id: sample for group in groups for sample, _ in group}
    spanning = [i for i, s in samples.items() if len(set(s.weight_versions[s.loss_mask])) == 2]
    assert spanning
    for part in (part for part in parts if part.sample_id in spanning):
        sample = samples[part.sample_id]
        if mode == "in_place":
            assert part.part == "prompt" and len(part.token_ids) == sample.prompt_len
            assert part.weight_version == part.held_version == 0
        else:
            assert (part.part, part.weight_version, part.held_version) == ("last", 1, 1)
            # the row of the last token of version 0 was computed by the request after it
            assert part.first_row == int(np.flatnonzero(sample.weight_versions == 0).max())
    assert {part.sample_id for part in parts} >= set(spanning)


def test_of_a_session_with_several_samples_every_place_is_rechecked():
    """Forks and later chains are where the joining of answers can go wrong."""
    rollout = rollout_section()
    episodes = SimpleNamespace(samples=3, make=lambda prompt: None)
    chosen = set()
    for group_id in range(20):
        group = SimpleNamespace(group_id=group_id, prompt=None)
        task = EpisodeTask(SimpleNamespace(rollout=rollout, episodes=episodes), group, 0)
        assert task.to_recheck(["fork", "last"]) == "last", "of one request: it has all tokens"
        for sample_id in range(task.sample_id, task.sample_id + 3):
            assert task.unbroken[sample_id].first is None
        chosen.add(task.to_recheck(["first", "fork", "last"]))
    assert chosen == {"first", "fork", "last"}

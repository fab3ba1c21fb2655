"""Sessions of agents under the producer: weight updates, retractions, slots, groups that are replaced."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.generation.session_play import Play, user
from tests.unit.generation.test_agent_episode import Access, ChatEndpoint
from tests.unit.generation.test_agent_episode import ask as ask_for
from tests.fakes.server import prompt_for, RETRACTED, rollout_section, SimulatedEngine

from r3train.chat.base import AgentFailed
from r3train.config.agent_settings import AgentSection
from r3train.engine.backend import SamplingParams
from r3train.generation.agent_episode import AgentEpisode, Agents
from r3train.generation import stitch
from r3train.generation.buffer import Group
from r3train.generation.shared import Counts
from r3train.generation.producer import Producer
from r3train.generation.recheck import Rechecking, Unbroken
from r3train.generation.episode_task import RequestSettings, Episodes
from r3train.types import RolloutSample

pytestmark = pytest.mark.usefixtures("virtual_clock")

CALLS = 8  # most of a session
OWN = 6  # tokens of an answer


async def ask(access: Access, *messages: dict) -> dict:
    return await ask_for(access, *messages, max_tokens=OWN)


class Rechecks:
    """Servers that are never done with a recheck."""

    def servers(self):
        return []

    async def recheck(self, request, part, server=None):
        await asyncio.Event().wait()


class ManySessions(ChatEndpoint):
    """Sessions without HTTP, many at once; each has a key of its own."""

    async def open(self, answer, take_reward=None, count=None) -> Access:
        access = Access("http://x/v1", f"k{len(self.open_keys)}-{id(answer)}", answer, take_reward)
        self.open_keys.add(access.key)
        return access


async def three_turns_and_a_fork(access: Access) -> float:
    """Four samples' worth of calls: three turns, a request behind the first, and another beginning."""
    messages = [user("go")]
    for _ in range(3):
        messages += [await ask(access, *messages), user("on")]
        await asyncio.sleep(0.005)
    await asyncio.gather(ask(access, *messages[:2], user("or")), ask(access, user("else")))
    return 1.0


def producer_of(
    engine, agent, *, most=4, recheck_share=0.0, on_failure="error", start=0, **rollout
):
    """A producer of an agent's sessions; engine: a backend, or what makes one in the producer's loop."""
    play = Play()
    sampling = SamplingParams(500)
    settings = replace(play.settings, max_context_len=2000, max_calls=CALLS)

    async def run(access, prompt, output):
        access.prompt = prompt
        return await agent(access)

    agents = Agents(
        AgentSection(agent="m:f", agent_on_failure=on_failure),
        settings,
        ManySessions(),
        run,
        "--agent m:f",
    )
    producer = Producer(
        rollout_section(**{"rollout_max_concurrency": 4, **rollout}),
        engine if callable(engine) else lambda: engine,
        prompt_for,
        RequestSettings(sampling),
        episodes=Episodes(
            make=lambda prompt: AgentEpisode(agents),
            samples=CALLS,
            most=most,
            keep_decoded=True,
            stats=agents.stats,
        ),
        recheck_share=recheck_share,
        start_rollout=start,
    )
    producer.agents = agents
    return producer


def engine_of(**how) -> SimulatedEngine:
    return SimulatedEngine(length=lambda _: 10**6, **how)


def assert_whole(sample: RolloutSample) -> None:
    assert sample.routed_experts.shape[0] == sample.num_tokens - 1
    assert sum(len(rows) for _, rows in sample.decoded) == sample.num_tokens - 1
    assert RETRACTED not in sample.token_ids
    versions = sample.weight_versions[sample.loss_mask]
    assert (np.diff(versions) >= 0).all() and (versions >= 0).all()


@pytest.mark.parametrize("mode", ["drain", "in_place", "abort", "retract"])
def test_sessions_go_on_over_weight_updates_in_every_mode(mode):
    engine = engine_of(tick_s=0.002)
    spans, ids = 0, []
    with producer_of(
        engine, three_turns_and_a_fork, max_weight_staleness=2, pause_generation_mode=mode
    ) as producer:
        for step in range(4):
            for group in producer.next_batch(step):
                assert {reward for _, reward in group} == {1.0}
                sessions = {sample.trajectory_id for sample, _ in group}
                assert len(sessions) == 2 and all(number % CALLS == 0 for number in sessions)
                for sample, _ in group:
                    assert_whole(sample)
                    ids.append(sample.sample_id)
                    versions = sample.weight_versions[sample.loss_mask]
                    assert step - versions.min() <= 2
                    spans += versions.min() < versions.max()
                session_samples = [s for s, _ in group if s.trajectory_id == min(sessions)]
                assert len(session_samples) == 3 and [s.is_last_step for s in session_samples] == [
                    False
                ] * 2 + [True]
                assert sum(int(s.loss_mask.sum()) for s in session_samples) == 5 * OWN
            time.sleep(0.01)  # of training: sessions are under way
            with producer.quiesced():
                engine.version = step + 1
                producer.set_version(step + 1)
    assert len(ids) == len(set(ids)) and spans > 0


def test_a_call_that_was_retracted_is_asked_for_again_and_the_agent_does_not_see_it():
    engine = engine_of(retracted=lambda n: n in (2, 9))  # three of one call would end the run
    with producer_of(engine, three_turns_and_a_fork) as producer:
        samples = [s for group in producer.next_batch(0) for s, _ in group]
        assert producer.stats()["retracted_answers"] > 0
    for sample in samples:
        assert_whole(sample)
    assert sum(int(s.loss_mask.sum()) for s in samples) == 4 * 5 * OWN


def test_a_session_holds_a_slot_during_its_calls_only():
    """Four sessions wait for one another between their calls, and one request is in flight at once."""
    alive, all_there = 0, None

    async def waits_for_all(access: Access) -> float:
        nonlocal alive, all_there
        all_there = all_there or asyncio.Event()
        answer = await ask(access, user("go"))
        alive += 1
        if alive == 4:
            all_there.set()
        async with asyncio.timeout(20):
            await all_there.wait()
        await ask(access, user("go"), answer, user("on"))
        return 0.0

    engine = engine_of()
    with producer_of(engine, waits_for_all, rollout_max_concurrency=1, num_rollout=1) as producer:
        assert len(producer.next_batch(0)) == 2
        assert producer.stats()["in_flight"] == 0


def test_no_more_sessions_are_alive_than_may_be():
    alive, most = 0, 0

    async def counted(access: Access) -> float:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        await ask(access, user("go"))
        alive -= 1
        return 0.0

    with producer_of(engine_of(), counted, most=3, n_samples_per_prompt=4) as producer:
        producer.next_batch(0)
    assert most == 3


def test_a_group_whose_agent_failed_is_replaced_and_its_others_end():
    ended = []

    async def fails_at_first(access: Access) -> float:
        if not ended and not fails_at_first.done:
            fails_at_first.done = True
            await asyncio.sleep(0.02)
            raise AgentFailed("it raised KeyError")
        try:
            await ask(access, user("go"))
            if fails_at_first.slow:
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            ended.append(access.key)
            raise
        return 0.0

    fails_at_first.done, fails_at_first.slow = False, True
    with producer_of(
        engine_of(tick_s=0.02), fails_at_first, on_failure="drop", num_rollout=1
    ) as producer:
        groups = [{s.group_id for s, _ in group} for group in producer.next_batch(0)]
        assert producer.stats()["outcomes"]["dropped_agent"] == 1
        assert producer.agents.stats()["agent"]["failures"] == 1
    assert groups == [{1}, {2}] and len(ended) == 1


def test_agents_that_always_fail_end_the_run():
    async def fails(access: Access) -> float:
        raise AgentFailed("no container")

    with producer_of(engine_of(), fails, on_failure="drop", rollout_batch_size=1) as producer:
        with pytest.raises(
            RuntimeError, match="--agent-on-failure dropped 65 groups in a row.*no container"
        ):
            producer.next_batch(0)
    with producer_of(engine_of(), fails) as producer:
        with pytest.raises(ValueError, match="sample .*--agent m:f failed: no container"):
            producer.next_batch(0)


@pytest.mark.parametrize("left_out", [0, 1])
def test_the_part_of_an_answer_that_nobody_took_is_not_rechecked(left_out):
    """The sample was cut before the answer, from whose request on its last version had computed it."""

    async def begun() -> int:
        rechecking = Rechecking(rollout_section(), 1.0, Counts())
        await rechecking.open(Rechecks(), [], SamplingParams(9), 0)
        sample = stitch.begin(prompt_for(3), sample_id=0, group_id=0)
        sample = stitch.observe(sample, [5] * 4)
        part = Unbroken()
        part.first = stitch.next_request(sample, SamplingParams(9), weight_version=0)
        part.first = replace(part.first, rows_start=sample.num_tokens - 2 + left_out)
        rechecking.finished(Group(0, sample.prompt), 0, sample, part, 0)
        found = len(rechecking.under_way)
        await rechecking.close()
        return found

    assert asyncio.run(begun()) == 1 - left_out

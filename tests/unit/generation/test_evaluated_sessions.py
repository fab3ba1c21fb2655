"""Sessions of an evaluation next to rollouts: they hold slots during their calls only, and are bounded themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.unit.generation.session_play import user
from tests.unit.generation.test_agents_in_the_producer import ask, CALLS, producer_of
from tests.unit.generation.test_evaluation import eval_set
from tests.fakes.server import EVAL_IDS, SimulatedEngine

from r3train.generation.agent_episode import AgentEpisode


def endless():
    return SimulatedEngine(length=lambda _: 10**6, tick_s=0.002)


def rollouts(engine):
    return sum(request.sample_id < EVAL_IDS for request in engine.requests)


def sessions(producer):
    """A set of four sessions of the producer's agents."""
    asked = eval_set(num_prompts=2, num_samples=2, max_new_tokens=500)
    episode = AgentEpisode(producer.agents, evaluates=True)
    return replace(asked, make_episode=lambda prompt: episode, samples_per_episode=CALLS)


def is_evaluated(access) -> bool:
    return access.prompt.prompt_id.startswith("e:")


@pytest.mark.timeout(60)
def test_an_evaluated_session_holds_no_slot_between_its_calls():
    """There is one slot; rollouts begin when a session has called once, and it goes on when they are complete."""
    begun, complete, waiting, loops = asyncio.Event(), asyncio.Event(), [], []

    async def waits_for_the_rollout(access) -> float:
        if not is_evaluated(access):
            await begun.wait()
        answer = await ask(access, user("go"))
        if is_evaluated(access):
            waiting.append(1)
            loops.append(asyncio.get_running_loop())
            begun.set()
            await complete.wait()
        await ask(access, user("go"), answer, user("on"))
        return 0.5

    engine = endless()
    how = {"most": 8, "rollout_max_concurrency": 1, "num_rollout": 2}
    with producer_of(engine, waits_for_the_rollout, **how) as producer:
        producer.begin_evaluation([sessions(producer)])
        try:
            assert len(producer.next_batch(0, _raising_after(200))) == 2
        finally:
            loops[0].call_soon_threadsafe(complete.set)
        producer.await_evaluation()
        rows = producer.take_evaluation()["held_out"]
    assert [row["reward"] for row in rows] == [0.5] * 4 and len(waiting) == 4
    assert engine.most == 1
    assert {row["version"] for row in rows} == {0}


def _raising_after(seconds: float):
    """A call of next_batch, about five times a second, that ends a wait without end."""
    calls = iter(range(int(seconds * 5)))

    def on_wait(stats) -> None:
        if next(calls, None) is None:
            raise TimeoutError(f"no rollout in {seconds} s: {stats}")

    return on_wait


def test_requests_that_an_evaluated_session_sends_at_once_keep_to_the_evaluations_share():
    async def three_at_once(access) -> float:
        count = 3 if is_evaluated(access) else 1
        await asyncio.gather(*(ask(access, user(f"go {n}")) for n in range(count)))
        return 0.5

    engine = endless()
    with producer_of(engine, three_at_once, rollout_max_concurrency=4) as producer:
        producer.eval_slots = 2
        producer.begin_evaluation([sessions(producer)])
        producer.next_batch(0)
        producer.await_evaluation()
        assert len(producer.take_evaluation()["held_out"]) == 4
    assert engine.most_evaluated == 2 and engine.most <= 4


def test_no_more_sessions_of_an_evaluation_are_alive_than_may_be():
    alive, most = 0, 0

    async def counted(access) -> float:
        nonlocal alive, most
        if is_evaluated(access):
            alive += 1
            most = max(most, alive)
            await asyncio.sleep(0.01)
        await ask(access, user("go"))
        alive -= is_evaluated(access)
        return 0.5

    with producer_of(endless(), counted, most=3, rollout_max_concurrency=8) as producer:
        producer.eval_slots = 8
        producer.begin_evaluation([sessions(producer)])
        producer.await_evaluation()
        producer.take_evaluation()
    assert most == 3

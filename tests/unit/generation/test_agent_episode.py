"""A rollout that an agent makes: its ends, its failures, its reward, and the place it takes meanwhile."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass

import pytest
from tests.unit.generation.session_play import assert_sound, Play, PROMPT, user

from r3train.chat.base import AgentFailed, ChatRefused, ChatRequest
from r3train.config.agent_settings import AgentSection
from r3train.engine.backend import EngineError, SamplingParams
from r3train.generation.agent_episode import AgentEpisode, Agents
from r3train.generation.episode import EpisodeDropped
from r3train.generation.sessions import Session


@dataclass
class Access:
    base_url: str
    key: str
    answer: object
    take_reward: object


class ChatEndpoint:
    """Sessions without HTTP: the access has the session's ``answer``."""

    def __init__(self) -> None:
        self.open_keys: set[str] = set()
        self.tasks: list[asyncio.Task] = []

    async def open(self, answer, take_reward=None, count=None) -> Access:
        self.open_keys.add("k")
        return Access("http://x/v1", "k", answer, take_reward)

    async def close(self, key: str) -> dict[str, int]:
        self.open_keys.remove(key)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return {"r3train": 1, "gpt-4.1": 2}

    async def stop(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"retries_joined": 0}


async def ask(access: Access, *messages: dict, **more) -> dict:
    answer, commit = await access.answer(ChatRequest(list(messages), b"", **more))
    commit(True)
    return answer.message


def play(run, *, evaluates=False, **settings):
    """Play the episode of an agent, with its recorded facts, its endpoint and its engine."""
    made = Play()
    records: list[dict] = []
    endpoint = ChatEndpoint()

    async def with_endpoint(access, prompt):
        access.endpoint = endpoint
        return await run(access)

    agents = Agents(
        AgentSection(agent="m:f", **settings),
        made.settings,
        endpoint,
        with_endpoint,
        "--agent m:f",
        records.append,
    )
    episode = AgentEpisode(agents, evaluates)
    made.agents, made.endpoint, made.records = agents, endpoint, records
    made.outcome = lambda: asyncio.run(
        episode(made.engine, PROMPT, sampling=SamplingParams(50), sample_id=128)
    )
    return made


async def answers(access) -> float:
    await ask(access, user("go"))
    return 0.5


async def raises(access) -> float:
    await ask(access, user("go"))
    raise AgentFailed("it raised KeyError")


async def never_calls(access) -> float:
    return 1.0


async def gives_text(access) -> object:
    await ask(access, user("go"))
    return "1.0"


def test_a_session_ends_with_its_samples_and_reward_and_its_key():
    made = play(answers)
    samples, reward = made.outcome()
    assert_sound(samples)
    assert reward == 0.5 and [s.sample_id for s in samples] == [128]
    assert made.endpoint.open_keys == set()
    [record] = made.records
    assert (record["calls"], record["failure"], record["reward"]) == (1, None, 0.5)
    assert record["models"] == {"r3train": 1, "gpt-4.1": 2}
    assert record["samples"][0]["with_loss"] == samples[0].loss_mask.sum()
    assert made.agents.stats()["agent"]["sessions"] == 1


@pytest.mark.parametrize(
    "agent, said",
    [
        (raises, "it raised KeyError"),
        (never_calls, "it never called the model"),
        (gives_text, "it gave the reward '1.0', expected a finite number or None"),
    ],
)
def test_an_agent_that_fails_ends_the_run_or_has_its_group_replaced(agent, said):
    with pytest.raises(ValueError, match=f"prompt p:1, sample 128: --agent m:f failed: {said}"):
        play(agent).outcome()
    made = play(agent, agent_on_failure="drop")
    with pytest.raises(EpisodeDropped) as dropped:
        made.outcome()
    assert dropped.value.reason == "agent" and made.records[0]["failure"] == said
    assert made.agents.stats()["agent"]["failures"] == 1 and made.endpoint.open_keys == set()


def test_a_failure_may_be_trained_if_the_agent_called_the_model():
    how = {"agent_on_failure": "train", "agent_failure_reward": -1.0}
    samples, reward = play(raises, **how).outcome()
    assert_sound(samples)
    assert reward == -1.0
    with pytest.raises(EpisodeDropped):
        play(never_calls, **how).outcome()


@pytest.mark.parametrize("agent", [raises, never_calls])
def test_in_an_evaluation_a_failure_counts_and_is_not_recorded(agent):
    made = play(agent, evaluates=True, agent_on_failure="drop")
    samples, reward = made.outcome()
    assert len(samples) == 1 and reward == 0.0 and made.records == []
    assert "sessions" not in made.agents.stats()["agent"]


@pytest.mark.parametrize("takes", [True, False])
def test_a_reward_that_is_posted_counts_if_it_may_and_none_is_returned(takes):
    async def posts(access):
        await ask(access, user("go"))
        if access.take_reward is not None:
            access.take_reward(0.25)

    assert play(posts, agent_reward_post=takes).outcome()[1] == (0.25 if takes else None)


def test_calls_under_way_when_the_agent_ends_are_cancelled_and_in_no_sample():
    async def leaves_one(access):
        answer = await ask(access, user("go"))
        access.endpoint.tasks.append(
            asyncio.create_task(ask(access, user("go"), answer, user("and a sub-agent")))
        )
        await asyncio.sleep(0)
        return 1.0

    made = play(leaves_one)
    made.engine.gates = {1: asyncio.Event()}
    samples, _ = made.outcome()
    assert len(samples) == 1 and made.records[0]["calls"] == 1
    assert_sound(samples)


def test_an_error_of_the_servers_ends_the_run_and_the_agent_whatever_the_agent_makes_of_it():
    async def hides_it(access):
        try:
            await ask(access, user("go"))
        except ChatRefused:
            await asyncio.sleep(60)
        return 1.0

    made = play(hides_it, agent_on_failure="drop")
    made.engine.errors = {0: EngineError("no server")}
    with pytest.raises(EngineError, match="no server"):
        made.outcome()
    assert made.endpoint.open_keys == set()


def test_a_cancelled_rollout_ends_its_agent_and_its_session():
    ended = []

    async def waits(access):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    made = play(waits)

    async def cancel_it():
        episode = AgentEpisode(made.agents)
        task = asyncio.create_task(
            episode(made.engine, PROMPT, sampling=SamplingParams(50), sample_id=0)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_it())
    assert ended == [True] and made.endpoint.open_keys == set()


def test_the_loop_answers_while_a_session_becomes_samples(monkeypatch):
    """Rows of many long samples take long to join."""
    joined, samples = threading.Event(), Session.samples

    def slow(session):
        assert joined.wait(20), "the loop stood still"
        return samples(session)

    monkeypatch.setattr(Session, "samples", slow)
    made = play(answers)

    async def go() -> None:
        episode = AgentEpisode(made.agents)
        running = asyncio.create_task(
            episode(made.engine, PROMPT, sampling=SamplingParams(50), sample_id=0)
        )
        await asyncio.sleep(0.1)
        joined.set()
        assert len((await running)[0]) == 1

    asyncio.run(go())


@pytest.mark.parametrize(
    "end, sessions, said", [("<|call|>", 12, 1), ("<|call|>", 7, 0), ("<|end|>", 12, 0)]
)
def test_forks_at_a_stop_token_of_no_template_are_said_once_with_their_cost(
    end, sessions, said, caplog
):
    async def two_turns(access) -> float:
        answer = await ask(access, user("go"))
        await ask(access, user("go"), answer, user("on"))
        return 1.0

    made = play(two_turns)
    made.engine.end = made.words.encode(end)[0]
    made.engine.answers = [f"well{end}"] * 2 * sessions
    for _ in range(sessions):
        made.outcome()
    warned = [r.getMessage() for r in caplog.records if end in r.getMessage()]
    assert len(warned) == said and all("8 of 16 calls" in text for text in warned)
    shares = [re.search(r"(\d+)% of", text) for text in warned]
    assert all(0 < int(share[1]) < 50 for share in shares)

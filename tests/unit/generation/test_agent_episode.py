"""A rollout that an agent makes: its ends, its failures, its reward, and the place it takes meanwhile."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass

import pytest
from tests.unit.generation.session_play import assert_sound, Play, PROMPT, TOOLS, user

from r3train.chat.base import AgentFailed, BadReward, ChatRefused, ChatRequest
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
        self.asked: list[dict] = []

    async def open(self, answer, take_reward=None, count=None) -> Access:
        self.open_keys.add("k")
        return Access("http://x/v1", "k", answer, take_reward)

    async def close(self, key: str) -> dict[str, int]:
        self.open_keys.remove(key)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return {"r3train": 1, "gpt-4.1": 2}

    def requests(self, key: str) -> list[dict]:
        return self.asked

    async def stop(self) -> None: ...

    def stats(self) -> dict[str, int]:
        return {"retries_joined": 0, "refused": 7, "refused_not_found": 7}


async def ask(access: Access, *messages: dict, **more) -> dict:
    answer, commit = await access.answer(ChatRequest(list(messages), b"", **more))
    commit(True)
    return answer.message


def play(run, *, evaluates=False, limits=(), **settings):
    """Play the episode of an agent, with its recorded facts, its endpoint and its engine."""
    made = Play(**dict(limits))
    records: list[dict] = []
    endpoint = ChatEndpoint()

    async def with_endpoint(access, prompt, output):
        access.endpoint, access.output = endpoint, output
        return await run(access)

    agents = Agents(
        AgentSection(agent="m:f", **{"agent_on_failure": "error"} | settings),
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


async def asks_on(access, *, then=None) -> float:
    """It ignores that its calls or its context are at their end until it is refused one, and then raises."""
    messages = [user("go")]
    while True:
        try:
            messages += [await ask(access, *messages), user("on")]
        except ChatRefused as refused:
            raise then or AgentFailed(f"it raised {refused.code}", 0.25) from None


_LIMITS = {"calls": {"max_calls": 2}, "context": {"max_context_len": 60}}


@pytest.mark.parametrize("limit", _LIMITS)
def test_an_agent_at_the_end_of_its_calls_or_context_has_not_failed(limit):
    made = play(asks_on, limits=_LIMITS[limit])
    samples, reward = made.outcome()
    assert_sound(samples)
    assert reward == 0.25 and len(samples) == 1
    [record] = made.records
    assert (record["truncated"], record["failure"], record["reward"]) == (limit, None, 0.25)
    stats = made.agents.stats()["agent"]
    assert (stats[f"truncated_{limit}"], stats["failures"]) == (1, 0)


@pytest.mark.parametrize("posts", [True, False])
def test_its_posted_reward_counts_and_without_one_it_is_scored(posts):
    async def raises_at_the_end(access):
        if posts:
            access.take_reward(0.75)
        await asks_on(access, then=AgentFailed("it raised"))

    made = play(raises_at_the_end, limits=_LIMITS["calls"], agent_reward_post=True)
    assert made.outcome()[1] == (0.75 if posts else None)


def test_a_limit_excuses_neither_a_bad_reward_nor_what_fails_after_another_answer():
    async def writes_text(access):
        await asks_on(access, then=BadReward("the reward 'good': expected a number"))

    async def goes_on(access):
        with pytest.raises(ChatRefused):
            await ask(access, user("x" * 500))
        await ask(access, user("go"))
        raise AgentFailed("it raised KeyError")

    async def asks_for_too_much_at_first(access):
        await ask(access, user("x" * 500))

    for agent, limits, said in (
        (writes_text, _LIMITS["calls"], "expected a number"),
        (goes_on, _LIMITS["context"], "it raised KeyError"),
        (asks_for_too_much_at_first, _LIMITS["context"], "never called the model"),
    ):

        async def fails(access, agent=agent):
            try:
                await agent(access)
            except ChatRefused:
                raise AgentFailed("it was refused") from None

        made = play(fails, limits=limits)
        with pytest.raises(ValueError, match=said):
            made.outcome()
        assert made.agents.stats()["agent"]["failures"] == 1


def test_a_session_that_ends_well_at_a_limit_is_counted_too():
    """The context is full with its last answer; --agent-max-answer-len and max_tokens are none of it."""

    async def one_call(access, **more) -> float:
        await ask(access, user("go"), **more)
        return 1.0

    async def bounded(access) -> float:
        return await one_call(access, max_tokens=3)

    cases = (one_call, {"max_context_len": 40}, "context"), (bounded, {}, None)
    for agent, limits, truncated in (*cases, (one_call, {"max_answer_len": 3}, None)):
        made = play(agent, limits=limits)
        made.engine.answers = ["red " * 50]
        [sample], reward = made.outcome()
        assert (sample.finish_reason, reward) == ("length", 1.0)
        assert made.records[0]["truncated"] == truncated
        assert truncated or sample.response_len == 3


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


REFUSED = {"request": "POST /v1/embeddings", "status": 404, "reason": "not_found"}
ANSWERED = {"request": "GET /v1/models", "status": 200, "reason": "", "count": 1, "first": ""}


def test_an_agent_without_a_call_is_quoted_with_its_refusals_and_its_last_lines():
    async def swallows(access) -> float:
        access.endpoint.asked = [ANSWERED, {**REFUSED, "count": 6, "first": "no such path"}]
        access.output += b"x" * 100_000 + b"\nTraceback\nError code: 404\n"
        return 0.0

    made = play(swallows, agent_on_failure="train")
    with pytest.raises(EpisodeDropped, match="POST /v1/embeddings 404 ×6 .no such path") as dropped:
        made.outcome()
    assert str(dropped.value).endswith("Traceback\nError code: 404")
    assert "6 requests were refused" in str(dropped.value) and len(str(dropped.value)) < 3000
    [record] = made.records
    assert record["requests"][1]["count"] == 6 and record["last_lines"][-1] == "Error code: 404"
    [(cause, count)] = made.agents.stats()["agent"]["causes"].items()
    assert cause.endswith("Error code: 404") and count == 1


def test_requests_with_a_wrong_key_are_said_of_the_agent_that_made_no_call(monkeypatch):
    counts = {}
    monkeypatch.setattr(ChatEndpoint, "stats", lambda self: dict(counts))

    async def has_a_wrong_key(access) -> float:
        counts["refused_invalid_api_key"] = 3
        return 0.0

    with pytest.raises(ValueError, match="3 requests were refused: 401 ×3"):
        play(has_a_wrong_key).outcome()


def test_an_agent_that_took_no_answer_is_told_from_one_that_never_called():
    async def leaves(access) -> float:
        await access.answer(ChatRequest([user("go")], b""))
        return 0.0

    with pytest.raises(ValueError, match="it took none of its 1 answers"):
        play(leaves).outcome()


def test_the_last_lines_of_a_session_that_ends_well_are_kept():
    async def prints(access) -> float:
        access.output += b"".join(b"line %d\n" % number for number in range(1000))
        return await answers(access)

    made = play(prints)
    made.outcome()
    assert made.records[0]["last_lines"] == [f"line {number}" for number in range(990, 1000)]


def test_refusals_of_the_endpoint_are_in_the_counts_of_a_run():
    counts = play(answers).agents.stats()["agent"]
    assert counts["refused"] == counts["refused_not_found"] == 7


UNREAD, READ = '<tool_call>{"name": "add"}</tool_call><|end|>', 'so [add {"a": 1}]<|end|>'


def sessions_of(*answers_of_model: str, tools=TOOLS, parsers=None):
    """One session for each answer; returns the play, and the answers that other parsers were asked to read."""
    asked: list = []

    async def others(unread) -> dict[str, int]:
        asked.append(list(unread))
        return parsers or {}

    async def asks(access) -> float:
        await ask(access, user("add"), tools=tools)
        return 1.0

    made = play(asks, agent_tool_call_parser="qwen25")
    made.agents.other_parsers = others
    for text in answers_of_model:
        made.engine.answers = [text]
        made.outcome()
    return made, asked


def test_calls_that_are_read_and_answers_that_only_look_like_calls_are_counted():
    made, _ = sessions_of(READ, UNREAD, "three<|end|>")
    found = [(r["tool_calls"], r["unread_calls"], r["with_tools"]) for r in made.records]
    assert found == [(1, 0, 1), (0, 1, 1), (0, 0, 1)]
    counts = made.agents.stats()["agent"]
    assert (counts["tool_calls"], counts["unread_calls"]) == (1, 1)
    made, _ = sessions_of(UNREAD, tools=())
    assert made.records[0]["unread_calls"] == 0


def test_a_run_whose_parser_reads_no_call_is_told_once_of_one_that_does(caplog):
    made, asked = sessions_of(*[UNREAD] * 40, parsers={"hermes": 4, "mimo": 1, "trinity": 4})
    [record] = [r for r in caplog.records if "qwen25" in r.getMessage()]
    assert "hermes and trinity can read 4 of 4" in record.getMessage()
    [unread] = asked
    assert [text for text, _ in unread] == [UNREAD.removesuffix("<|end|>")] * 4
    assert all(list(tools) == list(TOOLS) for _, tools in unread)


@pytest.mark.parametrize(
    "texts",
    [
        [READ, *[UNREAD] * 40],  # one is read
        ["three<|end|>"] * 40,  # nothing looks like a call
        [UNREAD] * 15,  # not many
    ],
    ids=["one read", "no call", "few"],
)
def test_a_parser_that_may_be_right_is_not_warned_of(texts, caplog):
    _, asked = sessions_of(*texts)
    assert asked == [] and not [r for r in caplog.records if "qwen25" in r.getMessage()]


def test_a_parser_that_nothing_replaces_is_told_of_too(caplog):
    sessions_of(*[UNREAD] * 20)
    assert any("none reads them" in r.getMessage() for r in caplog.records)


def test_other_parsers_that_cannot_be_asked_end_no_session(caplog):
    async def raises(answers):
        raise RuntimeError("the process of the parsers has ended")

    made, _ = sessions_of(*[UNREAD] * 15)
    made.agents.other_parsers = raises
    for _ in range(2):
        made.engine.answers = [UNREAD]
        assert made.outcome()[1] == 1.0
    assert any("parsers has ended" in r.getMessage() for r in caplog.records)

"""Rewards over HTTP, against real servers on loopback that answer, fail, hang and talk nonsense."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc

import pytest
from aiohttp import web
from tests.http_serving import serving
from tests.unit.rewards.test_scoring import sample, settings

from r3train.rewards.scoring import Scorer


async def score(handler, *samples, path="", **more) -> list[float]:
    """Rewards of samples by the server that ``handler`` is."""
    async with serving(handler) as address:
        url = f"http://{address}{path}"
        key = "rm_url" if more["rm_type"] == "remote_rm" else "judge_url"
        scorer = Scorer(settings(**{key: url, "reward_timeout_s": 5.0} | more))
        return list(await asyncio.gather(*(scorer(s) for s in samples)))


REMOTE = {"rm_type": "remote_rm"}
JUDGE = {"rm_type": "llm_judge", "judge_model": "judge"}


async def test_remote_rm_posts_prompt_response_label_and_metadata():
    bodies = []

    async def handler(request):
        bodies.append(await request.json())
        return web.json_response(0.25)

    row = sample("an answer", label=["a"], metadata={"level": 3})
    assert await score(handler, row, **REMOTE) == [0.25]
    (body,) = bodies
    assert body == {
        "prompt": "text",
        "response": "an answer",
        "label": ["a"],
        "metadata": {"level": 3},
    }


async def test_remote_rm_may_answer_with_a_table():
    async def handler(request):
        return web.json_response({"score": 1, "format": 0.5})

    assert await score(handler, sample(), reward_key="format", **REMOTE) == [0.5]
    with pytest.raises(ValueError, match="p.jsonl:7: .* --reward-key is not set"):
        await score(handler, sample(), **REMOTE)


async def test_a_server_that_fails_for_a_while_is_asked_again():
    statuses = iter([503, 429])

    async def handler(request):
        status = next(statuses, 200)
        return web.json_response(1.0, status=status)

    assert await score(handler, sample(), **REMOTE) == [1.0]
    assert next(statuses, None) is None


async def test_512_answers_are_asked_for_at_once():
    together = asyncio.Barrier(512)

    async def handler(request):
        await together.wait()
        return web.json_response(1.0)

    rewards = await score(
        handler, *[sample()] * 512, reward_concurrency=512, **REMOTE | {"reward_timeout_s": 300.0}
    )
    assert rewards == [1.0] * 512


async def test_calls_that_run_at_once_share_connections_which_end_with_the_last_of_them():
    connections, may_end = set(), asyncio.Event()

    async def handler(request):
        connections.add(request.transport)
        if (await request.json())["response"] == "waits":
            await may_end.wait()
        return web.json_response(1.0)

    async with serving(handler) as address:
        scorer = Scorer(settings(rm_url=f"http://{address}", reward_timeout_s=30.0, **REMOTE))
        waits = asyncio.create_task(scorer(sample("waits")))
        while not connections:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await scorer(sample("does not"))
        assert len(connections) == 2
        assert not any(transport.is_closing() for transport in connections)
        may_end.set()
        await waits
        async with asyncio.timeout(20):
            while not all(transport.is_closing() for transport in connections):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "answer, message",
    [
        (web.json_response({"detail": "no such field"}, status=422), "status 422: .*no such field"),
        (web.Response(status=500, text="down"), r"status 500: down .*reward_timeout_s 1\)"),
        (web.Response(text="<html>"), "the answer is not JSON"),
        (web.json_response("good"), "must be a finite number, got 'good'"),
        (None, r"no answer .*reward_timeout_s 1\)"),
    ],
)
async def test_a_server_that_stays_bad_ends_in_one_message(answer, message):
    async def handler(request):
        if answer is None:
            await asyncio.sleep(600)
        return web.Response(
            status=answer.status, body=answer.body, content_type=answer.content_type
        )

    with pytest.raises(ValueError, match=f"prompt p.jsonl:7: .*remote_rm .*{message}"):
        await score(handler, sample(), **REMOTE | {"reward_timeout_s": 1.0})


async def test_a_server_that_is_not_there_is_named():
    data = settings(rm_type="remote_rm", rm_url="http://127.0.0.1:9/rm", reward_timeout_s=1.0)
    with pytest.raises(ValueError, match="p.jsonl:7: remote_rm http://127.0.0.1:9/rm: Client"):
        await Scorer(data)(sample())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_named_and_nobody_there_is_asked(status):
    asked = []

    async def stranger(request):
        asked.append(request)
        return web.json_response(1.0)

    async with serving(stranger) as address:
        target = f"http://{address}/rm"

        async def moved(request):
            return web.Response(status=status, headers={"Location": target})

        message = f"p.jsonl:7: .*status {status}, a redirect to '{target}', which is not followed"
        with pytest.raises(ValueError, match=message):
            await score(moved, sample(), **REMOTE)
    assert not asked


async def test_a_compressed_or_endless_answer_is_refused_unread():
    headers, body = [], gzip.compress(b" " * (1 << 26))  # 64 KB

    async def packed(request):
        headers.append(request.headers["Accept-Encoding"])
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    tracemalloc.start()
    with pytest.raises(ValueError, match="has Content-Encoding 'gzip', and none was asked for"):
        await score(packed, sample(), **REMOTE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert headers == ["identity"] and peak < 1 << 24
    sent = []

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))
            sent.append(1)

    with pytest.raises(ValueError, match=f"the answer is longer than {16 << 20} bytes"):
        await score(endless, sample(), **REMOTE)
    assert len(sent) < 64


def completion(text):
    async def handler(request):
        handler.asked.append((request.path, request.headers, await request.json()))
        return web.json_response({"choices": [{"message": {"content": text}}]})

    handler.asked = []
    return handler


async def test_llm_judge_fills_the_template_and_reads_the_last_score():
    handler = completion("Score: 0? No.\nScore: 0.75")
    template = "Q {prompt} L {label} R {response}"
    row = sample("see {label} {prompt}", label=["a"])
    rewards = await score(handler, row, path="/v1", judge_template=template, **JUDGE)
    assert rewards == [0.75]
    ((path, _, body),) = handler.asked
    assert path == "/v1/chat/completions" and body["model"] == "judge" and body["temperature"] == 0
    (message,) = body["messages"]
    assert message == {"role": "user", "content": "Q text L ['a'] R see {label} {prompt}"}


async def test_llm_judge_without_a_score_is_0():
    assert await score(completion("I like it"), sample(), **JUDGE) == [0.0]


@pytest.mark.parametrize(
    "text, reward",
    [
        ("**Score:** 1", 1.0),
        ("Score: **1**", 1.0),
        ("Score\uff1a1", 1.0),
        ("Final score is 1", 1.0),
        ("Score = `0.5`", 0.5),
        ("Score: 1e-1", 0.1),
        ("Score: 50%", 0.5),
        ("Score: 8/10", 0.8),
        ("Score: 1.", 1.0),
        ([{"type": "text", "text": "Score:"}, {"type": "text", "text": " 1"}], 1.0),
    ],
)
async def test_llm_judge_reads_scores_as_models_write_them(text, reward):
    assert await score(completion(text), sample(), **JUDGE) == [reward]


async def test_a_judge_that_was_cut_is_said_to_be(caplog):
    async def handler(request):
        choice = {"message": {"content": None}, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})

    assert await score(handler, sample(), judge_max_tokens=7, **JUDGE) == [0.0]
    assert "counts 0: it was cut at --judge-max-tokens 7" in caplog.text


async def test_llm_judge_takes_another_pattern_and_refuses_another_protocol():
    pattern = r"<grade>(\d+)</grade>"
    handler = completion("<grade>7</grade>")
    assert await score(handler, sample(), judge_pattern=pattern, **JUDGE) == [7.0]

    async def second_request(request):
        return web.json_response({"text": "Score: 1"})

    with pytest.raises(ValueError, match="p.jsonl:7: llm_judge .*no completion in the answer"):
        await score(second_request, sample(), **JUDGE)


async def test_the_key_goes_to_the_judge_and_to_nobody_else():
    handler = completion("Score: 1")
    async with serving(handler) as address:
        data = settings(judge_url=f"http://{address}", reward_timeout_s=5.0, **JUDGE)
        assert await Scorer(data, judge_key="secret")(sample()) == 1.0
    assert handler.asked[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rm_type": "remote_rm"}, "remote_rm needs --rm-url"),
        ({"rm_type": "llm_judge", "judge_model": "m"}, "llm_judge needs --judge-url"),
        ({"rm_type": "llm_judge", "judge_url": "http://h/v1"}, "llm_judge needs --judge-model"),
        (JUDGE | {"judge_url": "http://h", "judge_pattern": "("}, "no regular expression"),
        (JUDGE | {"judge_url": "http://h", "judge_pattern": "[0-9]"}, "one group"),
        (JUDGE | {"judge_url": "http://h", "judge_template": "{prompt}"}, "no {response}"),
    ],
)
def test_settings_that_a_reward_lacks_are_named_before_anything_starts(given, message):
    with pytest.raises(ValueError, match=message):
        Scorer(settings(**given))

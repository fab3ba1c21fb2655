"""Answers that contradict themselves: asked for again, counted, bounded."""

import asyncio
import json

import pytest
from aiohttp import web

from r3train.engine.backend import AnswerCutShort, AnswerLate, BadAnswer
from tests.fakes.server import Fake, answer_to, client_of, one


def spoiling(times, spoil):
    """A handler whose first ``times`` answers are spoiled."""
    left = [times]

    async def handle(_request, body):
        answer = answer_to(body)
        if left[0]:
            left[0] -= 1
            spoil(answer)
        return web.json_response(answer)

    return handle


def one_log_prob_more(answer):
    answer["meta_info"]["output_token_logprobs"].append([-0.5, 9, None])


async def test_a_bad_answer_is_asked_for_again_under_another_id_and_counted():
    fake, told = Fake(spoiling(2, one_log_prob_more)), []
    options = dict(max_bad_answers=3, on_failed_try=lambda: told.append(1))
    async with client_of(fake, **options) as client:
        sample = await one(client)
    assert sample.token_ids.tolist() == [5, 6, 7, 9] and len(told) == 2
    assert len({body["rid"] for body in fake.bodies}) == 3


async def test_the_last_bad_answer_is_raised_with_its_sample_and_cause():
    fake, message = Fake(spoiling(9, one_log_prob_more)), "sample 7 .*2 log-probs for 1 tokens"
    async with client_of(fake, max_bad_answers=3) as client:
        with pytest.raises(BadAnswer, match=f"{message}.*bad answer 3, max_bad_answers 3"):
            await one(client, 7)
    assert len(fake.bodies) == 3


async def test_a_body_that_ends_early_is_a_bad_answer_with_both_lengths():
    async def cut(request, body):
        raw = json.dumps(answer_to(body)).encode()
        response = web.StreamResponse()
        response.content_length = len(raw)
        await response.prepare(request)
        await response.write(raw[:20])
        request.transport.close()
        return response

    fake, told = Fake(cut), []
    options = dict(max_bad_answers=2, on_failed_try=lambda: told.append(1))
    async with client_of(fake, **options) as client:
        with pytest.raises(AnswerCutShort, match="sample 0: .*ended after 20 bytes, expected 3"):
            await one(client)
    assert len(fake.bodies) == len(told) == 2


async def test_after_a_bad_answer_the_group_goes_to_another_server():
    fakes = [Fake(spoiling(9, one_log_prob_more)), Fake()]
    async with client_of(*fakes, max_bad_answers=2) as client:
        await asyncio.gather(*(one(client, i, i // 2) for i in range(4)))
        await one(client, 8, 0)
    assert len(fakes[0].bodies) <= 2 and fakes[1].bodies[-1]["rid"].split("-")[2] == "8"


def late(times, *, health=200):
    """A handler that leaves its first ``times`` generations unanswered; health: the status of its answer for it."""
    left = [times]

    async def handle(request, body):
        if request.path == "/health":
            return web.Response(status=health, headers={"Location": "/nowhere"})
        if request.path == "/generate" and left[0]:
            left[0] -= 1
            await asyncio.sleep(30)
        return web.json_response(answer_to(body))

    return handle


async def test_a_late_answer_of_a_healthy_server_is_aborted_there_and_asked_for_again():
    fake, told = Fake(late(2)), []
    options = dict(max_bad_answers=3, on_failed_try=lambda: told.append(1), request_timeout_s=0.3)
    async with client_of(fake, **options) as client:
        assert (await one(client)).token_ids.tolist() == [5, 6, 7, 9]
        asked = [b["rid"] for b, path in zip(fake.bodies, fake.paths) if path == "/generate"]
        await asyncio.sleep(0.1)
        aborted = [b["rid"] for b, path in zip(fake.bodies, fake.paths) if path == "/abort_request"]
    assert len(told) == 2 and len(set(asked)) == 3 and aborted == asked[:2]


async def test_the_last_late_answer_ends_the_job_with_its_sample_and_is_no_lost_server():
    fake = Fake(late(9))
    options = dict(max_bad_answers=2, request_timeout_s=0.2, versions=[1], changes=True)
    async with client_of(fake, **options) as client:
        with pytest.raises(BadAnswer, match="sample 7: no answer .* 0.2 s .bad answer 2, max_bad"):
            await one(client, 7)
    assert fake.paths.count("/generate") == 2


@pytest.mark.parametrize("health", [None, 503, 302], ids=["none", "bad", "elsewhere"])
async def test_a_late_answer_of_a_server_without_health_is_a_lost_server(health):
    async def nothing(_request, _body):
        await asyncio.sleep(30)

    fake, told = Fake(late(9, health=health) if health else nothing), []
    options = dict(max_bad_answers=3, on_failed_try=lambda: told.append(1), request_timeout_s=0.2)
    async with client_of(fake, health_timeout_s=0.2, **options) as client:
        with pytest.raises(AnswerLate, match="sample 0: no answer"):
            await one(client)
    assert not told and fake.paths.count("/generate") == 1

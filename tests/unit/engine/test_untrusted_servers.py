"""Servers and what stands before them: redirects, bodies without end, busy moments, answers to others."""

import asyncio
import gzip
import json
import tracemalloc

import pytest
from aiohttp import web

from r3train.engine import client as client_module, sglang_http
from r3train.engine.backend import (
    AnswerRefused,
    BadAnswer,
    EngineBusy,
    EngineDied,
    EngineError,
    Request,
    SamplingParams,
)
from r3train.engine.control import EngineControl
from r3train.types import RouteShape
from tests.fakes.server import (
    PROMPT,
    SAMPLING,
    Fake,
    answer_to,
    client_of,
    one,
)


def first(times, spoil):
    """A handler that has ``spoil`` make its first answers."""
    left = [times]

    async def handle(request, body):
        if left[0] and request.path == "/generate":
            left[0] -= 1
            made = spoil(request, body)
            return await made if asyncio.iscoroutine(made) else made
        return web.json_response(answer_to(body))

    return handle


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_an_error_that_names_its_target_and_nobody_there_is_asked(status):
    stranger = Fake()
    async with stranger.running() as addr:
        target = f"http://{addr}/generate"
        away = Fake(first(9, lambda *_: web.Response(status=status, headers={"Location": target})))
        async with client_of(away, max_bad_answers=3) as client:
            with pytest.raises(EngineError, match=f"answered {status}, a redirect to '{target}'"):
                await one(client)
    assert not stranger.bodies and len(away.bodies) == 1


async def test_no_compression_is_asked_for_and_a_compressed_answer_is_asked_for_again():
    packed = gzip.compress(b" " * (1 << 27))  # 130 KB

    def bomb(_request, _body):
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    fake = Fake(first(1, bomb))
    async with client_of(fake, max_bad_answers=2) as client:
        tracemalloc.start()
        assert (await one(client)).token_ids[-1] == 9
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len({body["rid"] for body in fake.bodies if "input_ids" in body}) == 2
    assert fake.headers[0]["Accept-Encoding"] == "identity"
    assert peak < 1 << 24


async def test_the_last_compressed_answer_says_so():
    def packed(*_):
        return web.Response(body=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})

    fake = Fake(first(9, packed))
    async with client_of(fake, max_bad_answers=2) as client:
        with pytest.raises(BadAnswer, match="sample 0: .*Content-Encoding 'gzip'.*bad answer 2"):
            await one(client)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_longer_than_its_request_allows_is_not_read_to_its_end(chunked):
    """3 tokens and at most 4 more: 7 KB and 1 MiB."""
    sent = []

    async def endless(request, _body):
        response = web.StreamResponse()
        if not chunked:
            response.content_length = 1 << 40
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 16))
            sent.append(1 << 16)

    fake = Fake(first(1, endless))
    async with client_of(fake, max_bad_answers=2) as client:
        assert (await one(client)).token_ids[-1] == 9
    assert sum(sent) < 1 << 25  # what sockets hold of it
    generates = [body for body in fake.bodies if "input_ids" in body]
    assert len(generates) == 2, "asked again"
    # the server is told, which would notice the closed connection seconds later
    assert {"rid": generates[0]["rid"]} in fake.bodies


async def test_the_longest_honest_answer_is_within_its_bound():
    def padded(size):
        def handle(_request, body):
            raw = json.dumps(answer_to(body)).encode()
            return web.Response(body=raw + b" " * (size - len(raw)))

        return handle

    bound = 7 * 1024 + (1 << 20)
    async with client_of(Fake(first(1, padded(bound)))) as client:
        assert (await one(client)).token_ids[-1] == 9
    async with client_of(Fake(first(1, padded(bound + 1)))) as client:
        with pytest.raises(BadAnswer, match=f"the body is longer than {bound} bytes"):
            await one(client)


def test_the_bound_of_a_body_holds_all_that_was_asked_for():
    def bound(routes=None, index_topk=None, **changes):
        base = dict(max_new_tokens=100, sampling=SamplingParams(100))
        request = Request(0, 0, "p", PROMPT.token_ids, **base | changes)
        return client_module.most_answer_bytes(request, routes, index_topk)

    plain = bound()
    assert plain == 103 * 1024 + (1 << 20)
    shape = RouteShape(48, 8, 128)
    ids = 102 * 48 * 8  # rows of 103 tokens, 4 bytes each, in base64
    assert plain + -(-ids * 4 // 3) * 4 / 4 <= bound(shape) <= plain + ids * 6
    assert plain < bound(shape, rows_start=90) < plain + (bound(shape) - plain) / 6
    # all rows, whatever was asked for
    chosen = bound(shape, index_topk=50, rows_start=90) - bound(shape, rows_start=90)
    assert -(-102 * 48 * 50 * 4 // 3) * 4 / 4 <= chosen <= 102 * 48 * 50 * 6
    # of a long text the bits are more than the ids
    bits = bound(shape, index_topk=50, max_new_tokens=9997) - bound(shape, max_new_tokens=9997)
    assert bits >= 9999 * 48 * 157 * 8 * 4 / 3
    kept = bound(sampling=SamplingParams(100, top_k=50, mask_vocab=1000))
    assert kept >= plain + 100 * 50 * len("151935, ")


async def test_the_pause_is_what_the_server_asks_for_within_bounds(monkeypatch):
    pauses = []

    yield_to_others = asyncio.sleep

    async def sleep(pause_s):
        if pause_s >= 1:
            pauses.append(pause_s)
        await yield_to_others(0)

    monkeypatch.setattr(sglang_http.asyncio, "sleep", sleep)
    asked = iter(["7", "100000", "Wed, 21 Oct 2026 07:28:00 GMT", "-5", "٣", ""])

    def busy(*_):
        return web.Response(status=503, headers={"Retry-After": next(asked)})

    async with client_of(Fake(first(6, busy)), request_timeout_s=1000) as client:
        await one(client)
    assert pauses == [7, 30, 4, 8, 16, 30]


async def test_a_groups_next_request_goes_to_another_server_than_the_busy_one(monkeypatch):
    monkeypatch.setattr(sglang_http, "BUSY_S", 0.05)

    async def busy_for_ever(*_):
        return web.Response(status=503)

    busy, other = Fake(busy_for_ever), Fake()
    async with client_of(busy, other) as client:
        assert (await one(client)).token_ids[-1] == 9
    assert len(busy.bodies) == len(other.bodies) == 1


async def test_a_busy_answer_of_a_server_that_has_died_is_its_death(monkeypatch):
    monkeypatch.setattr(sglang_http, "BUSY_S", 0.05)

    def dead():
        raise EngineDied("exit code 9")

    fake = Fake(first(99, lambda *_: web.Response(status=502)))
    async with client_of(fake, check_alive=dead) as client:
        with pytest.raises(EngineDied, match="exit code 9"):
            await one(client)


async def test_the_pause_of_a_busy_server_ends_with_its_call(monkeypatch):
    fake = Fake(first(99, lambda *_: web.Response(status=503, headers={"Retry-After": "30"})))
    async with client_of(fake) as client:
        call = asyncio.create_task(one(client))
        while not fake.bodies:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, 20)


@pytest.mark.parametrize("status", [400, 401, 404, 500])
async def test_other_refusals_are_final(status):
    fake = Fake(first(9, lambda *_: web.Response(status=status, text="no")))
    async with client_of(fake, max_bad_answers=3) as client:
        with pytest.raises(EngineError, match=f"answered {status}: no") as error:
            await one(client)
    assert len(fake.bodies) == 1 and not isinstance(error.value, EngineBusy)


async def test_two_answers_that_were_swapped_are_both_asked_for_again():
    waiting = []

    async def swap(_request, body):
        mine = asyncio.get_running_loop().create_future()
        waiting.append((body, mine))
        if len(waiting) == 2:
            (one_body, one_future), (other_body, other_future) = waiting
            one_future.set_result(answer_to(other_body))
            other_future.set_result(answer_to(one_body))
        return web.json_response(await mine)

    fake = Fake(first(2, swap))
    async with client_of(fake, max_bad_answers=2) as client:
        samples = await asyncio.gather(one(client, 0), one(client, 1))
    assert [s.sample_id for s in samples] == [0, 1] and len(fake.bodies) == 4
    # a server aborts every id that begins with the given one
    assert all(body["rid"].endswith(".") for body in fake.bodies)


async def test_a_text_computed_again_must_be_the_one_that_was_sent():
    async def another(_request, body):
        return web.json_response(answer_to(body | {"rid": "another"}))

    fake = Fake(another)
    async with client_of(fake, routes=RouteShape(1, 1, 2)) as client:
        request = Request(0, 0, "p", PROMPT.token_ids, 0, SAMPLING)
        with pytest.raises(ValueError, match="is to the request 'another', expected 'r3train-"):
            await client.recheck(request, "whole", 0)
    (body,) = fake.bodies
    # nothing of it may come from a cache, and no other id begins with its own
    assert body["extra_key"] == body["rid"] and body["rid"].endswith(".")
    assert body["logprob_start_len"] == 0 and body["sampling_params"]["max_new_tokens"] == 0


def aborted(_request, body):
    answer = answer_to(body)
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    return web.json_response(answer)


@pytest.mark.parametrize("shared", [False, True])
async def test_an_abort_of_this_client_is_read_and_ends_with_its_request(shared):
    told = asyncio.Event()

    async def handle(request, body):
        if request.path == "/abort_request":
            told.set()
            return web.json_response({})
        if len(fake.bodies) == 1:
            await told.wait()
        return aborted(request, body)

    fake = Fake(handle)
    async with client_of(fake, shared_servers=shared, max_bad_answers=1) as client:
        call = asyncio.create_task(one(client))
        while not fake.bodies:
            await asyncio.sleep(0.01)
        await client.abort()
        assert (await call).finish_reason == "abort"
        with pytest.raises(BadAnswer, match="nobody here aborted it"):
            await one(client, 1)


async def test_a_request_that_is_sent_while_all_are_aborted_may_be_aborted_too():
    held, arrived = asyncio.Event(), asyncio.Event()

    async def handle(request, body):
        if request.path == "/abort_request":
            arrived.set()
            await held.wait()
            return web.json_response({})
        return aborted(request, body)

    async with client_of(Fake(handle), max_bad_answers=1) as client:
        call = asyncio.create_task(client.abort())
        await arrived.wait()
        assert (await one(client)).finish_reason == "abort"
        held.set()
        await call
        with pytest.raises(BadAnswer, match="nobody here aborted it"):
            await one(client, 1)


async def test_a_version_that_no_server_was_given_is_asked_for_again():
    def future(_request, body):
        answer = answer_to(body)
        answer["meta_info"]["weight_versions"][0]["version"] = "7"
        return web.json_response(answer)

    fake = Fake(first(1, future))
    async with client_of(fake, versions=[0], max_bad_answers=2) as client:
        versions = client.members
        request = Request(
            0, 0, "p", PROMPT.token_ids, 4, SAMPLING, weight_version=0, exact_version=False
        )
        assert (await client.generate(request)).weight_versions.tolist() == [0]
        assert len(fake.bodies) == 2
        # an answer that an update froze may have the newer version, once it was given
        fake.handler = first(1, future)
        versions.record(None)
        versions.record(7)
        versions.record(None)
        versions.record(0)
        assert (await client.generate(request)).weight_versions.tolist() == [7]


async def test_ids_are_held_to_the_vocabulary_and_ends_to_the_server():
    def far(_request, body):
        answer = answer_to(body)
        answer["output_ids"] = [64]
        answer["meta_info"]["output_token_logprobs"][0][1] = 64
        return web.json_response(answer)

    async with client_of(Fake(first(9, far)), vocab_size=64) as client:
        with pytest.raises(BadAnswer, match="output token 0 is 64, expected 0 to 63"):
            await one(client)

    def short(_request, body):
        answer = answer_to(body)
        answer["meta_info"]["finish_reason"] = {"type": "length", "length": 1}
        return web.json_response(answer)

    async with client_of(Fake(first(9, short))) as client:
        with pytest.raises(BadAnswer, match="'length' after 1 tokens, 4 were asked for"):
            await one(client)
    full = lambda server: (range(4, 5),)[server]  # noqa: E731
    async with client_of(Fake(first(9, short)), ends_at=full) as client:
        assert (await one(client)).finish_reason == "length"


async def test_a_body_of_a_control_call_is_bounded():
    async def long(_request, _body):
        return web.Response(body=b" " * ((64 << 20) + 1))

    async with Fake(long).running() as addr:
        with EngineControl([addr]) as control:
            with pytest.raises(AnswerRefused, match=f"longer than {64 << 20} bytes"):
                await asyncio.to_thread(control.server_info)


async def test_no_proxy_of_the_environment_is_sent_prompts_and_keys(monkeypatch):
    stranger = Fake()
    async with stranger.running() as addr:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://{addr}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        async with client_of(Fake()) as client:
            assert (await one(client)).token_ids[-1] == 9
    assert not stranger.bodies

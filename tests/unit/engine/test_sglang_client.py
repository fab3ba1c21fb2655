"""The client's HTTP behaviour against a tiny server: balancing, errors, retries, timeouts."""

import asyncio
import contextlib
import os
import resource
import socket
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from aiohttp import web

from r3train.engine.backend import (
    EngineDied,
    EngineError,
    EngineUnreachable,
    Request,
    SamplingParams,
    sample_seed,
)
from r3train.engine.client import SGLangClient
from r3train.engine.addresses import base_url
from r3train.engine.sglang_http import SGLangHTTP
from r3train.types import RouteShape
from tests import whole_samples
from tests.http_serving import serving
from tests.wire_encoding import text_of
from tests.fakes.server import (
    PROMPT,
    SAMPLING,
    Fake,
    answer_to,
    client_of,
    hang_up,
    one,
    refuse,
)


async def test_the_request_carries_tokens_sampling_and_a_seed_of_its_own():
    fake = Fake()
    async with client_of(fake, api_key="secret") as client:
        sampling = SamplingParams(4, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(9,))
        sample = await one(client, 3, sampling=sampling)
        await one(client, 4, sampling=sampling)
    body = fake.bodies[0]
    assert sample.token_ids.tolist() == [5, 6, 7, 9]
    assert body["input_ids"] == [5, 6, 7] and body["return_logprob"] is True
    assert body["return_routed_experts"] is False
    assert body["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "ignore_eos": False,
        "stop_token_ids": [9],
        "sampling_seed": sample_seed(42, 3),
    }
    assert fake.headers[0]["Authorization"] == "Bearer secret"
    assert fake.bodies[1]["sampling_params"]["sampling_seed"] == sample_seed(42, 4)
    assert fake.bodies[0]["rid"] != fake.bodies[1]["rid"]


def test_seeds_differ_between_samples_and_runs_and_fit_31_bits():
    seeds = {sample_seed(run, i) for run in range(4) for i in range(1000)}
    assert len(seeds) == 4000 and all(0 <= seed < 2**31 for seed in seeds)


async def test_a_group_stays_on_one_server_and_groups_spread():
    gate = asyncio.Event()

    async def wait(_request, body):
        await gate.wait()
        return web.json_response(answer_to(body))

    fakes = [Fake(wait), Fake(wait)]
    async with client_of(*fakes) as client:
        calls = [asyncio.create_task(one(client, i, i // 4)) for i in range(16)]
        await asyncio.sleep(0.2)
        gate.set()
        await asyncio.gather(*calls)
    groups = [{int(body["rid"].split("-")[2]) // 4 for body in fake.bodies} for fake in fakes]
    assert [len(group) for group in groups] == [2, 2] and not groups[0] & groups[1]


async def test_a_refusal_carries_the_engines_words_and_the_sample_and_is_final():
    fake = Fake(refuse)
    async with client_of(fake, max_bad_answers=3) as client:
        with pytest.raises(EngineError, match="sample 8: .*/generate answered 400: too long"):
            await one(client, 8)
    assert len(fake.bodies) == 1


async def test_a_slow_answer_ends_at_the_timeout_with_the_sample():
    async def sleep(_request, _body):
        await asyncio.sleep(5)

    async with client_of(Fake(sleep), request_timeout_s=0.3, health_timeout_s=0.3) as client:
        with pytest.raises(EngineError, match="sample 2: no answer from .* within 0.3 s"):
            await one(client, 2)


async def test_a_broken_connection_is_not_retried():
    fake = Fake(hang_up)
    async with client_of(fake) as client:
        with pytest.raises(EngineError, match="sample 0: connection to .* broke"):
            await one(client)
    assert len(fake.bodies) == 1


async def test_a_dead_process_is_reported_instead_of_a_broken_connection():
    def dead():
        raise EngineDied("exit code 9, and the log")

    async with client_of(Fake(hang_up), check_alive=dead) as client:
        with pytest.raises(EngineDied, match="exit code 9"):
            await one(client)


def closed_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def test_nobody_listening_is_retried_and_then_said():
    client = SGLangClient([f"127.0.0.1:{closed_port()}"])
    with pytest.raises(EngineError, match="sample 0: cannot connect to http://127"):
        await one(client)
    await client.aclose()


async def test_a_server_too_busy_to_take_connections_is_asked_again(monkeypatch):
    monkeypatch.setattr("r3train.engine.sglang_http.CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one_more in waiting:  # its queue is full: a further connection is not answered
            one_more.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one_more.connect(place)
        client = SGLangClient([f"127.0.0.1:{place[1]}"])
        with pytest.raises(EngineUnreachable, match="sample 0: cannot connect to http://127"):
            await one(client)
        await client.aclose()
        for one_more in waiting:
            one_more.close()


async def test_a_process_without_a_descriptor_for_a_connection_has_lost_no_server():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    async with client_of(Fake()) as client:
        try:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limits[1])
            )
            with contextlib.suppress(OSError):
                while True:
                    held.append(open(os.devnull))
            with pytest.raises(EngineError, match="no file descriptor is left") as error:
                await one(client)
        finally:
            for file in held:
                file.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not isinstance(error.value, EngineUnreachable)
        assert (await one(client)).token_ids[-1] == 9, "the server was well"


async def test_a_server_that_comes_up_late_is_reached_by_a_retry():
    port = closed_port()
    client = SGLangClient([f"127.0.0.1:{port}"])
    call = asyncio.create_task(one(client))
    await asyncio.sleep(0.2)
    async with serving(Fake().handle, port):
        assert (await call).response_len == 1
        await client.aclose()


async def test_a_prompt_that_fills_the_context_is_refused_before_any_request():
    fake = Fake()
    async with client_of(fake) as client:
        with pytest.raises(ValueError, match="prompt 'p' has 3 tokens: .* leaves no room"):
            await one(client, sampling=SamplingParams(4, may_stop_at=(9,), max_context_len=3))
        await one(client, sampling=SamplingParams(4, may_stop_at=(9,), max_context_len=5))
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [2]


@pytest.mark.parametrize("addr", ["localhost", "http://host/path"])
def test_an_address_without_a_port_is_refused(addr):
    with pytest.raises(ValueError, match="has no port"):
        base_url(addr)


def test_no_address_at_all_is_refused():
    with pytest.raises(ValueError, match="no engine address"):
        SGLangHTTP([])


async def test_a_server_that_missed_an_update_gets_no_request_until_it_has_it():
    fakes = [Fake(), Fake()]

    async def ask(client, group_id, weight_version):
        await whole_samples.generate(
            client,
            PROMPT,
            SAMPLING,
            sample_id=group_id,
            group_id=group_id,
            weight_version=weight_version,
            exact_version=False,
        )

    def labelled(version):
        async def handle(_request, body):
            answer = answer_to(body)
            answer["meta_info"]["weight_versions"][0]["version"] = str(version)
            return web.json_response(answer)

        return handle

    async with client_of(*fakes, versions=[0, 0]) as client:
        versions = client.members
        await asyncio.gather(*[ask(client, i, 0) for i in range(8)])
        assert [len(fake.bodies) for fake in fakes] == [4, 4]
        versions.record(None)  # an update begins
        late = asyncio.create_task(ask(client, 0, 1))
        await asyncio.sleep(0.2)
        assert not late.done(), "nobody holds version 1 yet"
        fakes[1].handler = labelled(1)
        versions.record(1, server=1)
        await late
        await asyncio.gather(*[ask(client, i, 1) for i in range(8)])
        assert [len(fake.bodies) for fake in fakes] == [4, 13], "not even groups that were stuck"
        fakes[0].handler = labelled(1)
        versions.record(1, server=0)
        await asyncio.gather(*[ask(client, i, 1) for i in range(100, 108)])
        assert [len(fake.bodies) for fake in fakes] == [8, 17]


async def test_a_text_is_not_computed_again_on_a_server_that_has_other_weights_by_now():
    async with client_of(Fake(), versions=[3]) as client:
        versions = client.members
        client.sent_routes = object()  # nothing is sent, so no row is read
        request = Request(0, 0, "p", np.array(PROMPT.token_ids), 0, SAMPLING, weight_version=3)
        for change, held in (
            (partial(versions.record, None), None),
            (partial(versions.record, 4), 4),
        ):
            change()
            with pytest.raises(EngineError, match=f"holds weight version {held} .*no longer 3"):
                await client.recheck(request, "whole", 0)


async def test_where_no_server_ever_holds_the_weights_the_sample_says_so():
    async with client_of(Fake(), Fake(), versions=[3, None], request_timeout_s=0.3) as client:
        # after a restart of the servers it is sent again
        with pytest.raises(
            EngineUnreachable, match=r"sample 4: no server holds weight version 5 .*: 3, "
        ):
            await whole_samples.generate(client, PROMPT, SAMPLING, sample_id=4, weight_version=5)


async def test_a_resumed_request_sends_all_tokens_and_asks_for_the_rows_it_lacks():
    fake = Fake()
    async with client_of(fake, cache_per_version=True) as client:
        first = await one(client)
        client.routes = object()  # the question alone is looked at here
        with pytest.raises(ValueError):
            await whole_samples.generate(
                client,
                PROMPT,
                SAMPLING,
                weight_version=7,
                resume_from=replace(first, decoded=((0, np.zeros((3, 1, 1), np.uint8)),)),
                limit=2,
            )
    body = fake.bodies[1]
    assert body["input_ids"] == [5, 6, 7, 9] and body["routed_experts_start_len"] == 3
    assert body["sampling_params"]["max_new_tokens"] == 2, "3 are left, the turn takes 2"
    assert "extra_key" not in fake.bodies[0]
    # a job before this one may have left prefixes of its own version 7
    assert body["extra_key"] == body["rid"].split("-0-")[0] + "-weights-7"


async def test_a_cancelled_request_is_aborted_on_its_server():
    async def sleep(request, body):
        if request.path == "/generate":
            await asyncio.sleep(5)
        return web.json_response({})

    fake = Fake(sleep)
    async with client_of(fake) as client:
        call = asyncio.create_task(one(client, 3))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.aclose()
    assert fake.paths == ["/generate", "/abort_request"]
    assert fake.bodies[1] == {"rid": fake.bodies[0]["rid"]}


async def test_a_request_that_wants_no_routes_goes_past_their_transport_and_brings_none():
    class Transport:
        decode = None

        async def generate(self, *_):
            raise AssertionError("a transport of routes was asked")

        async def aclose(self):
            pass

    fake = Fake()
    async with client_of(fake, routes=RouteShape(2, 2, 8), transport=Transport()) as client:
        request = Request(1, 1, "p", PROMPT.token_ids, 4, SAMPLING)
        segment = await client.generate(replace(request, wants_routes=False))
        assert segment.rows is None and len(segment.token_ids)
        assert fake.bodies[0]["return_routed_experts"] is False
        assert "extra_key" not in fake.bodies[0]
        with pytest.raises(AssertionError, match="a transport of routes was asked"):
            await client.generate(request)  # as any other request does


async def test_what_indexers_chose_is_asked_for_with_the_routes_of_a_rollout():
    routes = RouteShape(1, 2, 8, dense_layer_ids=(0,))
    ids = [[[0, -1]], [[1, 0]], [[2, 0]]]  # three tokens and the new one: row 2 is not implied

    async def handle(_request, body):
        answer = answer_to(body)
        for name in ("routed_experts", "indexer_topk"):
            if body.get(f"return_{name}"):
                payload = np.zeros(6, "<i4") if name == "routed_experts" else np.array(ids, "<i4")
                answer["meta_info"][name] = text_of(payload)
        return web.json_response(answer)

    fake = Fake(handle)
    async with client_of(fake, routes=routes, index_topk=2) as client:
        request = Request(1, 1, "p", PROMPT.token_ids, 4, SAMPLING)
        segment = await client.generate(request)
        assert segment.indexer_topk.tolist() == [[[0b101]]] and len(segment.rows) == 3
        unasked = await client.generate(replace(request, wants_routes=False))
        assert unasked.indexer_topk is None and unasked.rows is None
        client.index_topk = None
        assert (await client.generate(request)).indexer_topk is None
        with pytest.raises(ValueError, match=r"^sample 1 \(prompt 'p'\): the answer carries no"):
            client.index_topk, ids[2] = 2, [[2, 2]]
            fake.handler = None
            await client.generate(request)
    asked = [body.get("return_indexer_topk") for body in fake.bodies]
    assert asked == [True, None, None, True]


async def test_a_request_for_fresh_prefixes_shares_none_with_another_weight_version():
    fake = Fake()
    async with client_of(fake) as client:
        request = Request(1, 1, "p", PROMPT.token_ids, 4, SAMPLING, fresh_prefix=True)
        for _ in range(2):
            await client.generate(replace(request, weight_version=0))
        with pytest.raises(ValueError):  # the server has version 0 alone
            await client.generate(replace(request, weight_version=1))
    keys = [body["extra_key"] for body in fake.bodies]
    assert keys[0] == keys[1] != keys[2]

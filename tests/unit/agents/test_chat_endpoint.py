"""The chat endpoint, asked by the unmodified openai client and by raw sockets."""

import asyncio
import gc
import gzip
import resource
from dataclasses import replace

import aiohttp
import openai
import orjson
import pytest
from aiohttp import web

from r3train.agents.http import Access, ChatEndpoint
from r3train.chat.base import ChatRefused
from r3train.config.agent_settings import AgentSection
from r3train.launch.job.agents import make_chat_endpoint
from tests.unit.agents.scripted import TOOL, Script, opened, until

_ASK = [{"role": "user", "content": "hi"}]


def _client(access, **settings):
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key, **settings)


async def _ask(client, **fields):
    return await client.chat.completions.create(model="m", messages=_ASK, **fields)


async def _post(access, body=None, retry=0, path="/chat/completions", **settings):
    """Status and JSON of one request without the openai client."""
    headers = {"Authorization": f"Bearer {access.key}", "x-stainless-retry-count": str(retry)}
    headers |= settings.pop("headers", {})
    data = orjson.dumps({"model": "m", "messages": _ASK}) if body is None else body
    async with aiohttp.ClientSession() as session:
        async with session.post(
            access.base_url + path, data=data, headers=headers, **settings
        ) as response:
            return response.status, await response.json()


async def _leave(access):
    """Send a request on a connection of its own, which the caller closes."""
    host = access.base_url.removeprefix("http://").removesuffix("/v1")
    name, _, port = host.partition(":")
    _, writer = await asyncio.open_connection(name, int(port))
    body = orjson.dumps({"model": "m", "messages": _ASK})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {access.key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


_MESSAGES = [
    {"content": "a\n\ndata: é\u2028"},
    {
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
        ],
    },
]


@pytest.mark.parametrize("message", _MESSAGES)
async def test_the_openai_client_gets_a_stream_that_equals_json(message):
    script = Script(message, message)
    async with opened(script) as (_, access):
        client = _client(access)
        whole = await _ask(client, tools=[TOOL])
        options = {"include_usage": True}
        async with client.chat.completions.stream(
            model="m", messages=_ASK, tools=[TOOL], stream_options=options
        ) as stream:
            streamed = await stream.get_final_completion()
    assert whole.usage == streamed.usage and whole.usage.total_tokens == 12
    choices = [answer.choices[0].model_dump() for answer in (whole, streamed)]
    for choice in choices:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        choice["message"].pop("parsed", None)
    assert choices[0] == choices[1]
    assert choices[0]["message"]["content"] == message["content"]
    assert script.requests[0].tools == [TOOL]
    assert script.deliveries == [(0, True), (1, True)]


async def test_an_answer_is_told_delivered_before_the_client_asks_on():
    script = Script()
    async with opened(script) as (_, access):
        client = _client(access)
        for turn in range(20):
            assert len(script.deliveries) == turn
            await _ask(client)
    assert script.deliveries == [(turn, True) for turn in range(20)]


async def test_a_marked_retry_joins_the_call_in_flight():
    script = Script()
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        asked = asyncio.create_task(_ask(_client(access, timeout=1.0, max_retries=5)))
        await until(lambda: endpoint.stats().get("retries_joined"))
        script.may_answer.set()
        assert (await asked).choices[0].message.content == "0"
        assert len(script.requests) == 1 and script.deliveries == [(0, True)]
        assert "undelivered" not in endpoint.stats()


async def test_a_marked_retry_gets_the_recorded_answer():
    script = Script()
    async with opened(script) as (_, access):
        assert await _post(access) == await _post(access, retry=1)
    assert len(script.requests) == 1 and script.deliveries == [(0, True)]


async def test_two_equal_requests_without_a_mark_are_two_calls():
    script = Script()
    async with opened(script) as (_, access):
        client = _client(access)
        answers = await asyncio.gather(_ask(client), _ask(client))
    assert {answer.choices[0].message.content for answer in answers} == {"0", "1"}
    assert len(script.deliveries) == 2


async def test_the_retries_of_two_equal_requests_get_both_answers():
    script = Script()
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        gone = [await _leave(access), await _leave(access)]
        await until(lambda: len(script.requests) == 2)
        for writer in gone:
            writer.close()
            await writer.wait_closed()
        first = asyncio.create_task(_post(access, retry=1))
        await until(lambda: endpoint.stats().get("retries_joined") == 1)
        second = asyncio.create_task(_post(access, retry=1))
        await until(lambda: endpoint.stats().get("retries_joined") == 2)
        script.may_answer.set()
        answers = [
            answer["choices"][0]["message"]["content"] for _, answer in (await first, await second)
        ]
    assert sorted(answers) == ["0", "1"] and sorted(script.deliveries) == [(0, True), (1, True)]


async def test_an_unknown_retry_and_one_of_a_failed_call_ask_the_model():
    script = Script(ChatRefused(400, "context_length_exceeded", "too long"))
    async with opened(script) as (_, access):
        assert (await _post(access, retry=1))[0] == 400
        assert (await _post(access, retry=2))[0] == 200
    assert len(script.requests) == 2


async def test_a_client_that_goes_away_does_not_cancel_and_its_answer_is_undelivered():
    script = Script()
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        writer = await _leave(access)
        await until(lambda: script.requests)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)  # a cancellation would come now
        script.may_answer.set()
        await until(lambda: endpoint.stats().get("answers"))
        await asyncio.sleep(0.1)  # as would a delivery
        assert (script.cancelled, script.deliveries) == (0, [])
        await endpoint.close(access.key)
        assert script.deliveries == [(0, False)] and endpoint.stats()["undelivered"] == 1


async def test_an_answer_that_its_client_left_goes_to_the_retry():
    script = Script()
    async with opened(script, max_parallel=1) as (endpoint, access):
        script.may_answer.clear()
        writer = await _leave(access)
        await until(lambda: script.requests)
        writer.close()
        await writer.wait_closed()
        script.may_answer.set()
        await until(lambda: endpoint.stats().get("answers"))
        assert (await _post(access, retry=1))[0] == 200
        assert script.deliveries == [(0, True)] and len(script.requests) == 1
        assert (await _post(access))[0] == 200  # a retry holds no slot


async def test_an_answer_at_the_sessions_end_is_not_given_if_it_was_told_undelivered():
    script = Script()
    async with opened(script) as (endpoint, access):
        ends = []

        async def answer(request):
            ends.append(
                asyncio.ensure_future(endpoint.close(second.key))
            )  # runs before the endpoint's handler
            return await script(request)

        second = await endpoint.open(answer)
        assert (await _post(second))[0] == 403
        await ends[0]
    assert script.deliveries == [(0, False)]


async def test_the_end_of_a_session_cancels_its_calls_and_refuses_its_key():
    script = Script()
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        client = _client(access)
        asked = asyncio.create_task(_ask(client))
        await until(lambda: script.requests)
        await endpoint.close(access.key)
        with pytest.raises(openai.PermissionDeniedError, match="session_over"):
            await asked
        with pytest.raises(openai.PermissionDeniedError, match="session_over"):
            await _ask(client)
    assert (script.cancelled, script.deliveries, len(script.requests)) == (1, [], 1)


async def test_a_key_opens_its_own_session_only():
    first_script, second_script = Script({"content": "one"}), Script({"content": "other"})
    async with opened(first_script) as (endpoint, access):
        second = await endpoint.open(second_script)
        assert len(access.key) == len("sk-r3train-") + 48 and second.key != access.key
        assert (await _ask(_client(second))).choices[0].message.content == "other"
        assert (await _ask(_client(access))).choices[0].message.content == "one"
        with pytest.raises(openai.AuthenticationError, match="no session has this key"):
            await openai.AsyncOpenAI(base_url=access.base_url, api_key="sk-x").models.list()
        await endpoint.close(second.key)
        assert (await _ask(_client(access))).choices[0].message.content == "1"
    assert (len(first_script.requests), len(second_script.requests)) == (2, 1)


@pytest.mark.parametrize(
    "error, code",
    [
        (ChatRefused(400, "context_length_exceeded", "too long"), "context_length_exceeded"),
        (RuntimeError("no server"), "answer_failed"),
    ],
)
async def test_what_fails_is_asked_once(error, code):
    script = Script(error)
    async with opened(script) as (_, access):
        with pytest.raises(openai.BadRequestError) as refused:
            await _ask(_client(access, max_retries=3))
    assert refused.value.code == code and len(script.requests) == 1


async def test_more_requests_than_may_run_at_once_wait():
    script = Script()
    async with opened(script, max_parallel=2) as (_, access):
        script.may_answer.clear()
        client = _client(access)
        asked = [asyncio.create_task(_ask(client)) for _ in range(5)]
        await until(lambda: len(script.requests) == 2)
        await asyncio.sleep(0.3)
        assert len(script.requests) == 2
        script.may_answer.set()
        await asyncio.gather(*asked)
    assert len(script.requests) == 5


async def test_a_request_whose_client_left_while_it_waited_asks_for_nothing():
    script = Script()
    async with opened(script, max_parallel=1) as (endpoint, access):
        script.may_answer.clear()
        asked = asyncio.create_task(_post(access))
        await until(lambda: script.requests)
        writer = await _leave(access)
        await asyncio.sleep(0.1)  # it is among those that wait
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        script.may_answer.set()
        await asked
        await until(lambda: endpoint.stats().get("refused"))
    assert len(script.requests) == 1


async def test_requests_that_wait_are_refused_at_the_end():
    script = Script()
    async with opened(script, max_parallel=1) as (endpoint, access):
        script.may_answer.clear()
        asked = [asyncio.create_task(_post(access)) for _ in range(3)]
        await until(lambda: script.requests)
        await endpoint.close(access.key)
        assert {status for status, _ in await asyncio.gather(*asked)} == {403}
    assert len(script.requests) == 1


async def test_anthropics_clients_are_answered_in_their_form():
    script = Script(_MESSAGES[1], ChatRefused(400, "context_length_exceeded", "too long"))
    async with opened(script) as (endpoint, access):
        body = {"model": "m", "max_tokens": 9, "system": "be", "messages": _ASK}
        headers = {"Authorization": "", "x-api-key": access.key}
        status, answer = await _post(access, orjson.dumps(body), path="/messages", headers=headers)
        assert status == 200 and answer["stop_reason"] == "tool_use"
        assert [block["type"] for block in answer["content"]] == [
            "thinking",
            "tool_use",
            "tool_use",
        ]
        assert await _post(access, orjson.dumps(body), retry=1, path="/messages") == (200, answer)
        status, answer = await _post(access, orjson.dumps(body), path="/messages")
        assert status == 400 and answer["error"]["message"].startswith("prompt is too long")
        status, answer = await _post(access, b"[]", path="/messages")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert [request.messages[0]["role"] for request in script.requests] == ["system"] * 2
    assert script.deliveries == [(0, True)]


@pytest.mark.parametrize("message", _MESSAGES)
async def test_the_responses_of_the_openai_client_are_equal_in_a_stream(message):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    async with opened(Script(message, message)) as (_, access):
        asked = {"model": "m", "input": "hi", "tools": [tool]}
        whole = await _client(access).responses.create(**asked)
        async with _client(access).responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
    assert whole.output_text == streamed.output_text == (message["content"] or "")
    made, again = (
        [item.model_dump(exclude={"id", "parsed_arguments"}) for item in response.output]
        for response in (whole, streamed)
    )
    for item in again:
        for part in item.get("content") or ():
            part.pop("parsed")
    assert made == again and whole.usage == streamed.usage


async def test_a_request_may_name_the_items_of_its_own_sessions_answers_alone():
    script, asked = Script({"content": "one"}), {"role": "user", "content": "more"}
    async with opened(script) as (endpoint, access):
        first = await _client(access).responses.create(model="m", input="hi")
        named = [{"type": "item_reference", "id": first.output[0].id}, asked]
        await _client(access).responses.create(model="m", input=named)
        assert script.requests[1].messages[0] == {"role": "assistant", "content": "one"}
        other = await endpoint.open(script)
        with pytest.raises(openai.BadRequestError, match="item_reference"):
            await _client(other).responses.create(model="m", input=named)


@pytest.mark.parametrize("model", ["r3train", "my-model", "openai/r3", "gpt-oss-20b", "o1x", ""])
async def test_any_name_but_another_providers_is_the_policys(model):
    async with opened(Script()) as (_, access):
        assert (await _post(access, orjson.dumps({"model": model, "messages": _ASK})))[0] == 200


_OTHERS = ["gpt-4.1-nano", "openai/gpt-5", "claude-haiku-4-5", "o3", "gemini-2.5-pro", "GPT-4o"]


@pytest.mark.parametrize("model", _OTHERS)
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_another_providers_name_is_no_call_of_the_policy(model, path):
    body = orjson.dumps({"model": model, "messages": _ASK, "input": "hi"})
    script = Script()
    async with opened(script) as (endpoint, access):
        status, answer = await _post(access, body, path=path)
        assert status == 404 and f"the model '{model}'" in answer["error"]["message"]
        assert await endpoint.close(access.key) == {model: 1}
        access = await endpoint.open(script)
        assert (await _post(access, body, path=path))[0] == 404
    assert script.requests == []


async def test_the_name_that_is_given_is_the_policys_alone():
    async with opened(Script(), model="gpt-5") as (_, access):
        assert access.model == "gpt-5"
        assert [model.id async for model in _client(access).models.list()] == ["gpt-5"]
        asked = {
            model: orjson.dumps({"model": model, "messages": _ASK}) for model in ("gpt-5", "m")
        }
        assert (await _post(access, asked["gpt-5"]))[0] == 200
        assert (await _post(access, asked["m"]))[0] == 404


async def test_other_models_are_asked_elsewhere_with_another_key_and_are_not_trained():
    judge, script = Script({"content": "yes"}, {"content": "yes"}), Script()
    async with opened(judge, model="gpt-4.1") as (_, there):
        other = {"other_base_url": there.base_url, "other_key": there.key}
        async with opened(script, **other) as (endpoint, access):
            client = _client(access)
            asked = {"model": "gpt-4.1", "messages": _ASK, "n": 1}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            texts = [p.choices[0].delta.content or "" async for p in stream if p.choices]
            assert whole.choices[0].message.content == "".join(texts) == "yes"
            assert (await _ask(client)).choices[0].message.content == "0"
            assert await endpoint.close(access.key) == {"gpt-4.1": 2, "m": 1}
            access = await endpoint.open(script)
            await endpoint.close(access.key)
    assert (len(judge.requests), len(script.requests)) == (2, 1)


async def test_the_settings_of_a_run_are_the_endpoints(monkeypatch):
    given = []
    versions = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-1m"}

    async def judge(request):
        given.append({n: v for n, v in request.headers.items() if n in sent})
        return web.json_response({"is": "the judge's"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("R3TRAIN_AGENT_OTHER_API_KEY", "sk-judge")
    sent = versions | {"Authorization": "Bearer sk-judge", "x-api-key": "sk-judge"}
    settings = {"agent_other_base_url": f"http://127.0.0.1:{port}/v1", "agent_strict": True}
    endpoint = make_chat_endpoint(AgentSection(agent="m:f", agent_model="r3", **settings))
    try:
        access = await endpoint.open(Script())
        for model, expected in (("r3", 400), ("judge", 200)):
            body = orjson.dumps({"model": model, "messages": _ASK, "n": 2})
            assert (await _post(access, body, headers=versions))[0] == expected
        assert given == [sent]
        await runner.cleanup()
        status, answer = await _post(access, body)
        assert status == 502 and f"--agent-other-base-url http://127.0.0.1:{port}" in str(answer)
    finally:
        await endpoint.stop()


async def test_models_are_listed_with_the_length_of_a_context():
    async with opened(Script(), max_model_len=4096) as (_, access):
        [model] = [model async for model in _client(access).models.list()]
        assert (model.id, model.max_model_len) == ("r3train", 4096)


async def test_a_session_is_named_by_its_path_in_all_dialects():
    script, rewards, endpoint = Script(), [], ChatEndpoint()
    try:
        access = await endpoint.open(script, rewards.append)
        for key in ("", "some-key-of-a-service"):
            way = Access(access.session_url, key)
            for path in _PATHS:
                body = orjson.dumps({"model": "m", "messages": _ASK, "input": "hi"})
                assert (await _post(way, body, path=path))[0] == 200
            assert [model.id async for model in _client(way).models.list()] == ["r3train"]
            assert (await _post(way, b"1", path="/r3train/reward"))[0] == 200
        assert (await _post(way, path="/embeddings"))[0] == 404
        assert len(script.requests) == 6 and rewards == [1.0, 1.0]
        told = endpoint.requests(access.key)
        paths = {fact["request"] for fact in told}
        assert "POST /v1/messages" in paths and "POST /v1/embeddings" in paths
        assert access.key not in str(told)
        other = Access(access.session_url.replace("sk-", "ks-"), access.key)
        assert (await _post(other))[0] == 401
        await endpoint.close(access.key)
        assert (await _post(way))[0] == 403
    finally:
        await endpoint.stop()


async def test_requests_for_other_models_go_on_without_the_sessions_key():
    judge = Script({"content": "yes"})
    async with opened(judge, model="gpt-4.1") as (_, judges):
        async with opened(Script(), other_base_url=judges.session_url) as (_, access):
            answer = await _client(Access(access.session_url, "x")).chat.completions.create(
                model="gpt-4.1", messages=_ASK
            )
            assert answer.choices[0].message.content == "yes"


@pytest.mark.parametrize("given", ["https://gw.example/a", "https://gw.example/a/v1/"])
async def test_agents_are_told_the_public_name(given):
    endpoint = make_chat_endpoint(AgentSection(agent="m:f", agent_base_url=given), 512)
    try:
        access = await endpoint.open(Script())
        assert access.base_url == "https://gw.example/a/v1"
        assert access.session_url == f"https://gw.example/a/s/{access.key}/v1"
    finally:
        await endpoint.stop()


async def test_tokens_are_counted_by_the_session():
    endpoint, asked = ChatEndpoint(), []

    async def count(request):
        asked.append(request.messages)
        return 42

    try:
        access = await endpoint.open(Script(), None, count)
        body = orjson.dumps({"model": "m", "messages": _ASK})
        found = await _post(access, body, path="/messages/count_tokens")
        assert found == (200, {"input_tokens": 42}) and asked == [_ASK]
    finally:
        await endpoint.stop()


@pytest.mark.parametrize("path", ["/completions", "/embeddings", "/", "/chat/completions/x"])
async def test_another_path_is_told_the_one_there_is(path):
    async with opened(Script()) as (_, access):
        status, answer = await _post(access, path=path)
    assert status == 404 and "there is POST /v1/chat/completions" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body, headers, status, what",
    [
        (b"{", {}, 400, "not JSON"),
        (b"x" * ((64 << 20) + 1), {}, 413, "67108864 bytes"),
        (b"no gzip", {"Content-Encoding": "gzip"}, 400, "gzip"),
        (gzip.compress(b"x" * ((64 << 20) + 1)), {"Content-Encoding": "gzip"}, 413, "67108864"),
    ],
    ids=["no JSON", "too large", "no gzip", "a gzip bomb"],
)
async def test_a_bad_body_is_refused_in_openais_form(body, headers, status, what):
    script = Script()
    async with opened(script) as (endpoint, access):
        got, answer = await _post(access, body, headers=headers)
        assert got == status and what in answer["error"]["message"]
        assert (await _post(access))[0] == 200
        assert endpoint.stats() == {"refused": 1, "refused_body": 1, "answers": 1}
        refused, answered = endpoint.requests(access.key)
        assert refused["request"] == "POST /v1/chat/completions" and what in refused["first"]
        assert (refused["status"], refused["reason"], refused["count"]) == (status, "body", 1)
        assert (answered["status"], answered["reason"], answered["count"]) == (200, "", 1)


async def test_a_body_that_breaks_off_holds_no_slot():
    script = Script()
    async with opened(script, max_parallel=1) as (_, access):
        host, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {access.key}\r\n"
        writer.write(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        await writer.drain()
        asked = asyncio.create_task(_post(access))
        await asyncio.sleep(0.2)
        assert not asked.done()
        writer.close()
        assert (await asked)[0] == 200


_PATHS = {"/chat/completions": b": ping", "/responses": b"keepalive", "/messages": b"event: ping"}


async def _streamed(access, path, script):
    """The parts of a stream: what comes while the model has not answered, and the rest."""
    body = orjson.dumps({"model": "m", "messages": _ASK, "input": "hi", "stream": True})
    headers = {"Authorization": f"Bearer {access.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(access.base_url + path, data=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            parts = [await response.content.readany()]
            while not any(ping in parts[0] for ping in _PATHS.values()):
                parts[0] += await response.content.readany()
            script.may_answer.set()
            return parts[0], await response.content.read()


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("path, ping", _PATHS.items(), ids=_PATHS)
async def test_a_stream_has_headers_and_pings_before_its_answer(path, ping, begins):
    script = Script({"content": "late"}, begins=begins)
    async with opened(script) as (_, access):
        script.may_answer.clear()
        first, rest = await asyncio.wait_for(_streamed(access, path, script), 30)
        assert ping in first and b"late" not in first and b"late" in rest
        assert script.deliveries == [(0, True)]


@pytest.mark.parametrize("path", _PATHS)
async def test_what_fails_in_a_stream_is_an_event_of_it(path):
    script = Script(ChatRefused(400, "engine_error", "the run has failed"), begins=True)
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        _, rest = await _streamed(access, path, script)
        assert b"the run has failed" in rest and endpoint.stats()["refused"] == 1


async def test_a_refusal_before_the_model_is_asked_has_its_status_in_a_stream_too():
    async with opened(Script(ChatRefused(400, "context_length_exceeded", "x"))) as (_, access):
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            await _ask(_client(access), stream=True)


async def test_an_equal_request_joins_a_call_that_its_client_left():
    script = Script(begins=True)
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        with pytest.raises(openai.APITimeoutError):
            await _ask(_client(access, timeout=0.5, max_retries=0))
        asked = asyncio.create_task(_ask(_client(access)))
        await until(lambda: endpoint.stats().get("retries_joined"))
        script.may_answer.set()
        assert (await asked).choices[0].message.content == "0"
        assert (await _ask(_client(access))).choices[0].message.content == "1", "it was delivered"
    assert script.deliveries == [(0, True), (1, True)]


async def test_a_stream_that_its_client_left_is_joined():
    script = Script(begins=True)
    async with opened(script) as (endpoint, access):
        script.may_answer.clear()
        stream = await _ask(_client(access), stream=True)
        await stream.close()
        asked = asyncio.create_task(_ask(_client(access)))  # a fallback, as Claude Code's
        await until(lambda: endpoint.stats().get("retries_joined"))
        script.may_answer.set()
        assert (await asked).choices[0].message.content == "0"
    assert script.deliveries == [(0, True)]


async def test_ignored_fields_are_counted():
    async with opened(Script()) as (endpoint, access):
        await _ask(_client(access), temperature=0.5, tool_choice="required")
        await _ask(_client(access), temperature=0.5)
        assert endpoint.stats() == {
            "answers": 2,
            "ignored_temperature": 2,
            "ignored_tool_choice": 1,
        }


async def test_a_posted_reward_is_taken_where_it_may_be():
    rewards, endpoint = [], ChatEndpoint()
    try:
        taking, second_script = await endpoint.open(Script(), rewards.append), await endpoint.open(
            Script()
        )
        assert (await _post(taking, b"1.5", path="/r3train/reward"))[0] == 200
        assert (await _post(taking, b'{"a": 1}', path="/r3train/reward"))[0] == 200
        status, answer = await _post(taking, b"NaN", path="/r3train/reward")
        assert status == 400 and "expected a finite number" in answer["error"]["message"]
        assert (await _post(second_script, b"1", path="/r3train/reward"))[0] == 404
    finally:
        await endpoint.stop()
    assert rewards == [1.5, {"a": 1.0}]


async def test_a_port_that_is_taken_is_refused_in_one_line():
    async with opened(Script()) as (_, access):
        port = int(access.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        with pytest.raises(ValueError, match=f"--agent-port {port}: cannot listen there"):
            await ChatEndpoint(AgentSection(agent_port=port)).start()


async def test_a_body_is_not_kept_beyond_its_answer():
    def kept() -> int:
        gc.collect()
        return sum(isinstance(o, web.Request) for o in gc.get_objects())

    async with opened(Script()) as (_, access):
        before = kept()  # of tests before this one
        async with _client(access) as client:
            for _ in range(5):
                await _ask(client)
            assert kept() - before <= 1, "the last one of the connection"


def _address(access) -> tuple[str, int]:
    name, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    return name, int(port)


_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n"


@pytest.mark.parametrize("sent", [b"", _HEAD, _HEAD + b"\r\n{", _HEAD + b"x-api-key: KEY\r\n\r\n{"])
async def test_a_connection_without_a_whole_request_is_closed(sent):
    script = Script()
    async with opened(script, idle_s=0.2, max_parallel=1) as (_, access):
        reader, writer = await asyncio.open_connection(*_address(access))
        writer.write(sent.replace(b"KEY", access.key.encode()))
        answer = await asyncio.wait_for(reader.read(), 30)
        assert (b" 408 " in answer) == (b"KEY" in sent) and (b" 401 " in answer) == (
            sent[-1:] == b"{" and b"KEY" not in sent
        )
        writer.close()
        assert (await _post(access))[0] == 200, "it holds no slot"


async def test_a_connection_that_waits_for_its_answer_stays():
    script = Script()
    async with opened(script, idle_s=0.1) as (_, access):
        script.may_answer.clear()
        asked = asyncio.create_task(_post(access))
        await asyncio.sleep(0.5)
        script.may_answer.set()
        assert (await asked)[0] == 200


async def test_nobody_notices_a_strangers_idle_connections():
    count, script = 500, Script()
    async with opened(script) as (_, access):
        strangers = await asyncio.gather(
            *(asyncio.open_connection(*_address(access)) for _ in range(count))
        )
        try:
            asked = await asyncio.gather(*(_post(access) for _ in range(20)))
            assert [status for status, _ in asked] == [200] * 20
            assert not any(reader.at_eof() for reader, _ in strangers)
        finally:
            for _, writer in strangers:
                writer.close()


async def test_connections_above_a_quarter_of_the_open_files_are_refused_and_sessions_go_on():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bound = 30
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * bound, hard))
    try:
        script, strangers = Script(), []
        async with opened(script) as (_, access):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            async with aiohttp.ClientSession(headers={"x-api-key": access.key}) as session:
                url = f"{access.base_url}/chat/completions"
                body = {"model": "m", "messages": _ASK}
                async with session.post(url, json=body) as response:
                    assert response.status == 200
                for _ in range(2 * bound):
                    strangers.append(await asyncio.open_connection(*_address(access)))
                ends = [asyncio.create_task(reader.read()) for reader, _ in strangers]
                done, stay = await asyncio.wait(ends, timeout=1.0)
                assert len(stay) == bound - 1
                async with session.post(url, json=body) as response:
                    assert response.status == 200
            for task, (_, writer) in zip(ends, strangers):
                task.cancel()
                writer.close()
            await asyncio.gather(*ends, return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_refusals_are_kept_by_path_status_and_reason_in_their_session_alone():
    script = Script(ChatRefused(503, "aborted", "ask again"), begins=True)
    async with opened(script, strict=True) as (endpoint, access):
        other = await endpoint.open(Script())
        fields = {"messages": [{"role": "user", "content": "hi"}]}
        for body in ({"messages": []}, fields | {"n": 2}, fields | {"n": 3}, fields):
            await _post(access, orjson.dumps(body))
        await _post(replace(access, key="sk-unknown"))
        async with aiohttp.ClientSession() as client:
            for number in range(40):
                headers = {"Authorization": f"Bearer {access.key}"}
                await client.get(f"{access.base_url}/{number}", headers=headers)
        found = {(r["request"], r["status"], r["reason"]): r for r in endpoint.requests(access.key)}
        chat = "POST /v1/chat/completions"
        assert found[chat, 400, "messages"]["count"] == found[chat, 503, "aborted"]["count"] == 1
        assert (
            found[chat, 400, "n"]["count"] == 2 and "n 2 is not" in found[chat, 400, "n"]["first"]
        )
        # the number of paths is bounded, not what they count
        assert len(found) < 40 and sum(r["count"] for r in found.values()) == 44
        assert endpoint.requests(other.key) == []
        counts = endpoint.stats()
        assert counts["refused"] == 45 and counts["refused_invalid_api_key"] == 1
        assert counts["refused_not_found"] == 40 and counts["refused_n"] == 2

"""The client of a served teacher against a server that answers as SGLang does."""

from __future__ import annotations

import numpy as np
import pytest
from aiohttp import web

from r3train.engine.backend import EngineError
from r3train.engine.teacher import ServedTeacher
from r3train.types import Prompt, RolloutSample
from tests.fakes.server import Fake, hang_up, refuse

WORDS = {0: "<pad>", 1: "a", 2: "b", 3: "c"}


def sample(mask: str = "..xx.x") -> RolloutSample:
    """A sample of two prompt tokens; x marks the model's own."""
    own, n = np.array([mark == "x" for mark in mask]), len(mask)
    return RolloutSample(
        sample_id=4,
        group_id=1,
        prompt=Prompt("p", 0, "", np.array([10, 11], np.int32), None),
        token_ids=np.arange(10, 10 + n, dtype=np.int32),
        prompt_len=2,
        loss_mask=own,
        rollout_log_probs=np.zeros(n, np.float32),
        routed_experts=None,
        weight_versions=np.zeros(n, np.int32),
        finish_reason="stop",
    )


def scored(body: dict) -> dict:
    """SGLang's answer to a text that is scored: the log-prob of token 10 + t is -t."""
    start = body["logprob_start_len"]
    entries = [[10.0 - i, i, None] for i in body["input_ids"][start:]]
    entries[0][0] = None
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": 0,
        "cached_tokens": start,
        "input_token_logprobs": entries,
    }
    return {"meta_info": meta}


async def scores(_request, body):
    if "tokens" in body:
        return web.json_response({"text": [WORDS[token] for (token,) in body["tokens"]]})
    return web.json_response(scored(body))


SETTINGS = dict(api_key=None, request_timeout_s=300.0, max_concurrency=64, max_tries=3)


async def ask(fake: Fake, call, **options):
    async with fake.running() as addr:
        teacher = ServedTeacher(f"http://{addr}", **SETTINGS | options)
        try:
            return await call(teacher)
        finally:
            await teacher.aclose()


async def test_every_token_of_the_models_own_has_the_teachers_log_prob_and_no_other():
    fake = Fake(scores)
    found = await ask(fake, lambda teacher: teacher(sample()), api_key="k" * 16)
    assert found.teacher_log_probs.tolist() == [0, 0, -2, -3, 0, -5]
    assert found.teacher_log_probs.dtype == np.float32
    (body,) = fake.bodies
    assert body["logprob_start_len"] == 1 and body["input_ids"] == sample().token_ids.tolist()
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert fake.headers[0]["Authorization"] == "Bearer " + "k" * 16


async def test_an_answer_without_a_token_asks_nobody():
    fake = Fake(refuse)
    found = await ask(fake, lambda teacher: teacher(sample("..")))
    assert found.teacher_log_probs.tolist() == [0, 0] and not fake.bodies


def spoiled(change):
    async def handle(_request, body):
        answer = scored(body)
        change(answer["meta_info"])
        return web.json_response(answer)

    return handle


@pytest.mark.parametrize(
    "handler, message",
    [
        (refuse, "too long"),
        (hang_up, "connection to .* broke"),
        (spoiled(lambda meta: meta.pop("input_token_logprobs")), "0 log-probs for 5 tokens"),
        (spoiled(lambda meta: meta["input_token_logprobs"].pop()), "4 log-probs for 5 tokens"),
        (spoiled(lambda meta: meta.update(id="another")), "is to the request 'another', expected"),
        (
            spoiled(lambda meta: meta["input_token_logprobs"].reverse()),
            "log-prob 0 is of token 15, token 0 is 11",
        ),
        (
            spoiled(lambda meta: meta["input_token_logprobs"][2].__setitem__(0, None)),
            "log-prob 2 is",
        ),
    ],
)
async def test_a_teacher_that_fails_is_asked_again_and_then_named(handler, message, monkeypatch):
    monkeypatch.setattr("r3train.engine.teacher.PAUSE_S", 0.01)
    fake = Fake(handler)
    # no EngineError: a restart of the run's local servers fixes nothing
    with pytest.raises(RuntimeError, match=rf"teacher http://.*{message}.*\(try 3 of 3\)") as error:
        await ask(fake, lambda teacher: teacher(sample()))
    assert not isinstance(error.value, EngineError) and "sample 4" in str(error.value)
    assert len(fake.bodies) == 3


async def test_one_failure_is_mended_by_the_next_answer(monkeypatch):
    monkeypatch.setattr("r3train.engine.teacher.PAUSE_S", 0.01)
    left = [1]

    async def once(request, body):
        left[0] -= 1
        return await (hang_up if left[0] == 0 else scores)(request, body) or web.Response()

    found = await ask(Fake(once), lambda teacher: teacher(sample()))
    assert found.teacher_log_probs.tolist() == [0, 0, -2, -3, 0, -5]


async def test_no_more_requests_than_asked_for_are_in_flight():
    import asyncio

    running = [0, 0]

    async def slow(request, body):
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.05)
        running[0] -= 1
        return await scores(request, body)

    async def several(teacher):
        await asyncio.gather(*(teacher(sample()) for _ in range(6)))

    await ask(Fake(slow), several, max_concurrency=2)
    assert running[1] == 2


async def test_another_vocabulary_is_refused_with_its_first_token():
    async def check(teacher, words):
        await teacher.check_vocabulary(lambda ids: words[ids[0]], sorted(words))

    await ask(Fake(scores), lambda teacher: check(teacher, WORDS))
    with pytest.raises(ValueError, match="another one: token 2 is 'b' there and 'B' here"):
        await ask(Fake(scores), lambda teacher: check(teacher, WORDS | {2: "B"}))

    async def none(_request, _body):
        return web.json_response({"error": {"message": "no tokenizer"}}, status=500)

    with pytest.raises(EngineError, match="no tokenizer"):
        await ask(Fake(none), lambda teacher: check(teacher, WORDS))


async def test_a_key_that_is_refused_names_the_teachers_variable():
    async def locked(_request, _body):
        return web.json_response({"error": "Unauthorized"}, status=401)

    with pytest.raises(RuntimeError, match="no one is in R3TRAIN_TEACHER_API_KEY here"):
        await ask(Fake(locked), lambda teacher: teacher(sample()), max_tries=1)

"""Sessions of the unmodified openai client on the real server: every chain equals one prefill of its tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from tests.e2e.sglang_support import ROUTES
from tests.unit.data.test_replies import tokenizer
from tests.unit.data.test_session_templates import CHATML
from tests.unit.generation.session_play import PROMPT

from r3train.agents.http import ChatEndpoint
from r3train.chat.base import Parsed
from r3train.config.data_settings import DataSection
from r3train.data.templates import ChatTemplate, SessionTemplate
from r3train.engine.backend import SamplingParams
from r3train.engine.client import SGLangClient
from r3train.engine.control import EngineControl
from r3train.generation import stitch
from r3train.generation.sessions import Session, SessionSettings
from r3train.types import missing_marker, RolloutSample

pytestmark = pytest.mark.e2e

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
Ask = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture(scope="module")
def server(model_server, models):
    with EngineControl([model_server.addr]) as control:
        control.update_weights_from_disk(str(models[0]), weight_version=0)
        yield model_server


async def read(text: str, tools: Any) -> Parsed:
    """Noise is no call: with tools every answer is said to be one, after a thought."""
    if not tools:
        return Parsed(text)
    return Parsed(text, "a thought", ({"name": "add", "arguments": '{"a": 0}'},))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def three_turns(ask: Ask, change: Callable[[int, list], None] = lambda *_: None) -> None:
    messages = [{"role": "system", "content": "you add"}, user("go")]
    for turn in range(3):
        answer = await ask(*messages, tools=TOOLS, tool_choice="required")
        del answer["reasoning_content"]  # as most harnesses do
        messages.append(answer)
        change(turn, messages)
        for call in answer["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})


async def edited(ask: Ask) -> None:
    def change(turn: int, messages: list) -> None:
        if turn == 1:
            messages[2]["content"] = "(removed)"

    await three_turns(ask, change)


async def compacted(ask: Ask) -> None:
    messages = [user("go")]
    for turn in range(3):
        messages += [await ask(*messages), user("on")]
        if turn == 1:
            messages = [user("in short, go on")]


async def at_once(ask: Ask) -> None:
    answer = await ask(user("name tools"))
    await asyncio.gather(*(ask(user("name tools"), answer, user(word)) for word in "abc"))


async def with_stops(ask: Ask) -> None:
    messages = [user("go")]
    for _ in range(3):
        messages += [await ask(*messages, stop=["e", "a"], max_tokens=60), user("on")]


END_TOKEN = 1  # the checkpoint's


async def played(server, harness: Callable[[Ask], Awaitable[None]]) -> tuple[Session, list, list]:
    """The session of a harness, its samples, and each of them rechecked."""
    words = tokenizer(CHATML)
    client, endpoint = SGLangClient([server.addr], routes=ROUTES), ChatEndpoint()
    sampling = SamplingParams(
        max_new_tokens=600,
        # the server stops at the checkpoint's end token whatever it is asked, as in a job
        stop_token_ids=(*words.encode("<|end|>"), END_TOKEN),
        max_context_len=900,
    )

    async def generate(sample: RolloutSample, limit: int) -> RolloutSample:
        request = stitch.next_request(sample, sampling, limit=limit, weight_version=0)
        return stitch.extend(sample, await client.generate(request))

    settings = SessionSettings(
        template=SessionTemplate.of(ChatTemplate(words, DataSection(prompt_data="p.jsonl"))),
        read=read,
        decode=lambda ids: words.decode(ids, skip_special_tokens=False),
        sampling=sampling,
        max_context_len=900,
        history="append",
        max_calls=64,
        max_answer_len=None,
    )
    failures: list[BaseException] = []
    session = Session(settings, generate, PROMPT, 64, fail=failures.append)
    access = await endpoint.open(session.answer)
    openai = AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=0)

    async def ask(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        how = {"model": "r3", "max_tokens": 12, "temperature": 0.3} | more
        answer = await openai.chat.completions.create(messages=messages, **how)
        return answer.choices[0].message.model_dump(exclude_none=True)

    try:
        await harness(ask)
        await endpoint.close(access.key)
        assert not failures
        samples, again = session.samples(), []
        for sample in samples:
            request = stitch.next_request(sample, SamplingParams(1000), weight_version=0)
            request = replace(request, rows_start=0, max_new_tokens=0)
            again.append(await client.recheck(request, "whole", 0))
        return session, samples, again
    finally:
        await endpoint.stop()
        await client.aclose()


def forks(session: Session) -> int:
    """Calls that do not extend the chain of the call that they follow, of which one may.

    None may where that call's answer was ended by the checkpoint's end token, as it can be at any length: the template does
    not write this token.
    """
    followed = Counter(id(call.parent) for call in session.calls if call.parent is not None)
    calls = [call for call in session.calls if id(call) in followed]
    last = [int(call.chain.sample.token_ids[call.end - 1]) for call in calls]
    return followed.total() - sum(token != END_TOKEN for token in last)


@pytest.mark.parametrize(
    "harness, roots, least_forks",
    [(three_turns, 1, 0), (edited, 2, 0), (compacted, 2, 0), (at_once, 1, 2), (with_stops, 1, 0)],
)
def test_every_chain_has_the_rows_and_log_probs_of_one_prefill_of_its_tokens(
    harness, roots, least_forks, server
):
    session, samples, again = asyncio.run(played(server, harness))
    begins = Counter(chain.begins for chain in session.chains)
    assert begins["root"] == roots and begins["fork"] == forks(session) >= least_forks
    assert begins.total() == len(session.chains) == len(samples)
    for sample, prefill in zip(samples, again):
        rows = sample.routed_experts
        assert len(rows) == sample.num_tokens - 1 and not (rows == missing_marker(rows.dtype)).any()
        np.testing.assert_array_equal(np.sort(rows), np.sort(prefill.rows))
        own = np.flatnonzero(sample.loss_mask)
        off = np.abs(sample.rollout_log_probs[own] - prefill.log_probs[own - 1])
        assert len(own) and off.max() < 1e-5

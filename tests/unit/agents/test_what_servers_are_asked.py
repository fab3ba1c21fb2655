"""No setting of sampling that a harness asks for reaches a server: the request is the run's, whatever the body says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.unit.agents.scripted import opened, TOOL
from tests.fakes.server import client_of, Fake, SAMPLING
from tests.unit.generation.session_play import Play, PROMPT

from r3train.generation import stitch
from r3train.generation.sessions import Session

_RUN = replace(SAMPLING, max_new_tokens=400, temperature=0.9, top_p=0.8, top_k=7, seed=5)


async def _asked(**fields: Any) -> dict[str, Any]:
    """The body that a server gets for a harness's request with these fields, through the endpoint and a session."""
    fake, play = Fake(), Play()
    async with client_of(fake) as client:

        async def generate(sample, limit):
            request = stitch.next_request(sample, _RUN, limit=limit)
            return stitch.extend(sample, await client.generate(request))

        session = Session(play.settings, generate, PROMPT, 640, fail=play.failures.append)
        async with opened(session.answer) as (_, access):
            async with AsyncOpenAI(base_url=access.base_url, api_key=access.key) as harness:
                await harness.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], tools=[TOOL], **fields
                )
    [body] = fake.bodies
    del body["rid"]
    return body


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.1, "top_p": 0.2, "seed": 3},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"logprobs": True, "top_logprobs": 5, "reasoning_effort": "low"},
        {"extra_body": {"top_k": 1, "min_p": 0.5, "regex": "a+", "ebnf": "root ::= 'a'"}},
        {"extra_body": {"sampling_params": {"temperature": 0}, "json_schema": "{}"}},
    ],
)
async def test_a_harness_changes_nothing_of_the_sampling(fields):
    asked = await _asked(**fields)
    assert asked == await _asked()
    sampling = asked["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.9, 0.8, 7)


async def test_a_harness_bounds_the_length_of_an_answer():
    asked, plain = await _asked(max_tokens=3), await _asked()
    assert (asked["sampling_params"].pop("max_new_tokens"), asked) == (
        3,
        plain | {"sampling_params": {**asked["sampling_params"]}},
    )
    assert plain["sampling_params"]["max_new_tokens"] == 400

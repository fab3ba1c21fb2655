"""Agents that share an event loop: a client that one of them left open is collected while another waits."""

from __future__ import annotations

import asyncio
import gc
import time

import openai
from tests.unit.agents.scripted import opened, Script

from r3train.generation.environment_loop import EnvironmentLoop

_ASK = [{"role": "user", "content": "hi"}]


async def test_a_client_that_was_left_open_takes_no_other_session_with_it():
    """Garbage is collected in the endpoint's thread: the socket closes at once, its transport later."""
    script, agents = Script(), EnvironmentLoop("--agent-timeout-s")
    async with opened(script) as (_, access):

        def client() -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=access.base_url, api_key=access.key, max_retries=0, timeout=5
            )

        async def leaves() -> None:
            await client().chat.completions.create(model="m", messages=_ASK)

        async def waits() -> str:
            async with client() as connection:
                answer = await connection.chat.completions.create(model="m", messages=_ASK)
            return answer.choices[0].message.content

        gc.disable()
        try:
            await agents.ask(leaves, "the first agent", 10)
            await asyncio.sleep(0.1)
            second_agent = asyncio.create_task(agents.ask(waits, "the second agent", 10))
            await asyncio.sleep(0)
            gc.collect()
            time.sleep(1)  # the second agent's request is on its way when this loop goes on
            assert await second_agent == "1"
        finally:
            gc.enable()

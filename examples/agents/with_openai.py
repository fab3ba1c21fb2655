"""The openai client as an agent in a function of --agent, which runs in the trainer's process.

It may await all that it likes; nothing of it may block: asyncio.to_thread is for that.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from r3train.chat.base import AgentTask

_MAKE = {
    "name": "make",
    "description": "Make a number.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
}


async def run(task: AgentTask) -> float:
    """Let the model call its tool until it ends with text; the reward is 1 for the number that was asked for."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.key)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    made: list[int] = []
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="r3train",
            messages=messages,
            tools=[{"type": "function", "function": _MAKE}],
            max_tokens=6,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            made.append(json.loads(call.function.arguments)["number"])
            result = {"role": "tool", "tool_call_id": call.id, "content": f"total {made[-1]}"}
            messages.append(result)
    return max(0.0, 1 - abs(task.label - made[0]) / 5) if made else 0.0

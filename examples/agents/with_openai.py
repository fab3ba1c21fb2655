"""The openai client as an agent in a function of --agent, which runs in the trainer's process.

It may await all that it likes; nothing of it may block: asyncio.to_thread is for that.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from r3train.chat.base import AgentTask

_PICK = {
    "name": "pick",
    "description": "Pick a word.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}


async def run(task: AgentTask) -> float:
    """Let the model pick twice by its tool; the reward is the share of picks that the prompt accepts."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.key) as client:
        return await _picked(client, task) / 2


async def _picked(client: AsyncOpenAI, task: AgentTask) -> int:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    good = 0
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="r3train",
            messages=messages,
            tools=[{"type": "function", "function": _PICK}],
            max_tokens=4,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        call = message.tool_calls[0]
        word = json.loads(call.function.arguments)["word"]
        good += word in task.label
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"the {word}"})
    return good

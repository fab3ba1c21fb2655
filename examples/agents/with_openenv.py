"""An environment of OpenEnv as a harness: its server gives observations and rewards, the model's texts are the actions.

    uvicorn my_env.server:app --port 8000
    r3train train ... --agent-command "/PATH/python /PATH/with_openenv.py http://127.0.0.1:8000 guess"

The second argument is the field of the action that takes the text.  Each session has an episode of its own; a row's
metadata are the arguments of its reset, such as a seed.  base_url and key are in OpenAI's variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openenv.core.generic_client import GenericEnvClient

MOST_TURNS = 10
url, field = sys.argv[1:]
task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())


def shown(observation: dict[str, Any]) -> str:
    """An observation as text: as it is where it has one field, else as JSON."""
    values = [value for value in observation.values() if value is not None]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)


async def main() -> None:
    """Play an episode, and write the sum of its rewards."""
    messages = [{"role": "user", "content": task["prompt"]}]
    reward = 0.0
    async with AsyncOpenAI() as client, GenericEnvClient(base_url=url) as env:
        found = await env.reset(**task["metadata"])
        for _ in range(MOST_TURNS):
            messages.append({"role": "user", "content": shown(found.observation)})
            answer = await client.chat.completions.create(model="r3train", messages=messages)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            found = await env.step({field: text})
            reward += found.reward or 0.0
            if found.done:
                break
    Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(reward))


asyncio.run(main())

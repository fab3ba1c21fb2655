"""The openai-agents SDK as a harness: it calls a tool, and its last answer says how that went.

Run by ``r3train train`` as --agent-command; base_url and key are in OpenAI's variables.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())
asked = int(task["prompt"].split()[-1])
made: list[int] = []


@function_tool
def make(number: int) -> str:
    """Make a number."""
    made.append(number)
    return f"total {number}"


model = OpenAIChatCompletionsModel("r3train", AsyncOpenAI())
agent = Agent(
    "maker",
    instructions="please",
    model=model,
    tools=[make],
    model_settings=ModelSettings(max_tokens=6),
)
try:
    Runner.run_sync(agent, task["prompt"], max_turns=3)
except Exception as error:  # the model made no end of it: what it did counts
    print(f"{type(error).__name__}: {error}")
reward = max(0.0, 1 - abs(asked - made[0]) / 5) if made else 0.0
Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(reward))

"""The openai-agents SDK as a harness: its tool takes words until the model has picked twice.

Run by ``r3train train`` as --agent-command; base_url and key are in OpenAI's variables.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

task = json.loads(Path(os.environ["R3TRAIN_TASK_FILE"]).read_text())
picked: list[str] = []


@function_tool
def pick(word: str) -> str:
    """Pick a word."""
    picked.append(word)
    return f"the {word}"


agent = Agent(
    "picker",
    instructions="please",
    model=OpenAIChatCompletionsModel("r3train", AsyncOpenAI()),
    tools=[pick],
    model_settings=ModelSettings(max_tokens=4),
)
try:
    Runner.run_sync(agent, task["prompt"], max_turns=2)
except MaxTurnsExceeded:
    pass
good = sum(word in task["metadata"]["accepted"] for word in picked[:2])
Path(os.environ["R3TRAIN_REWARD_FILE"]).write_text(json.dumps(good / 2))

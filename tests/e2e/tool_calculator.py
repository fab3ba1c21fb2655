"""The calculator as a tool of the chat template, which answers in messages; it blocks at some prompts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from r3train.environments.environment import StepResult, Turn
from r3train.environments.calculator import Calculator
from r3train.types import Prompt

# prompts from this line on: those of the fourth rollout of 4 prompts, with --no-rollout-shuffle
HANGS_FROM = 12
HANGS_S = 60
TEMPLATE = (
    "{% if tools %}please {{ tools[0].function.name }} <eos>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}count {% endif %}{{ m.content }} <eos>{% endfor %}"
    "{% if add_generation_prompt %} to{% endif %}"
)


def use_template(model: Path) -> None:
    """Give a checkpoint's tokenizer the template, all of words that it has."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))


class ToolCalculator(Calculator):
    tools = [{"type": "function", "function": {"name": "make", "parameters": {}}}]

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self._hangs = prompt.index >= HANGS_FROM

    async def step(self, turn: Turn) -> StepResult:
        if self._hangs:
            time.sleep(HANGS_S)  # and not asyncio's: all environments wait
        result = await super().step(turn)
        return replace(result, observation=[{"role": "tool", "content": result.observation}])

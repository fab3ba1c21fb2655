"""A model that may run Python programs before it answers; --rm-type scores the answer.

    PYTHONPATH=examples/tools r3train train ... \
        --environment python_tool:PythonTool --apply-chat-template --rm-type gsm8k

Programs run with the limits of docs/guide/data_and_rewards.md, which is no sandbox.
"""

from __future__ import annotations

import asyncio
import time

from r3train.environments import StepResult, Turn
from r3train.environments.tool_calls import ToolCall, tool_calls
from r3train.rewards.code import run_program
from r3train.types import Prompt

TIMEOUT_S = 10.0  # of all programs of a turn together
MOST_CALLS = 8
MOST_CHARACTERS = 2000
# an error is printed, for the model to read
PROGRAM = """import sys, traceback
try:
    exec(compile({code!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception:
    traceback.print_exc(limit=0, file=sys.stdout)
"""


class PythonTool:
    """Runs the programs of a turn; a turn without a call is the answer."""

    tools = [
        {
            "type": "function",
            "function": {
                "name": "python",
                "description": "Run a Python program and read what it prints.",
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "The program."}},
                    "required": ["code"],
                },
            },
        }
    ]

    def __init__(self, prompt: Prompt) -> None:
        """Nothing of the prompt is needed."""

    async def step(self, turn: Turn) -> StepResult:
        calls = tool_calls(turn.text)
        deadline = time.monotonic() + TIMEOUT_S
        contents = [await self._result(call, deadline) for call in calls[:MOST_CALLS]]
        if left := len(calls[MOST_CALLS:]):
            contents.append(f"{left} more calls were not run: a turn may have {MOST_CALLS}")
        results = [{"role": "tool", "content": content} for content in contents]
        return StepResult(results, done=not calls)

    async def _result(self, call: ToolCall, deadline: float) -> str:
        code = call.arguments.get("code")
        if call.error or call.name != "python" or not isinstance(code, str):
            return call.error or "there is one tool, python, and its argument is code, a text"
        program = PROGRAM.format(code=code)
        output = await asyncio.to_thread(run_program, program, "", deadline - time.monotonic())
        if output is None:
            return (
                f"the programs of a turn have {TIMEOUT_S:g} s: this one took more than was left,"
                " printed too much, or was ended"
            )
        return output[:MOST_CHARACTERS] or "it printed nothing"

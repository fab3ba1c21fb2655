"""A parser for the language of the tiny model, whose words are numbers: the first of an answer is a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from r3train.chat.base import Parsed

_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo"  # mini-swe-agent's way to end


def parse(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
    """Find a call of the first tool in an answer that has a number."""
    number = next((word for word in text.split() if word.isdigit()), None)
    if number is None or not tools:
        return Parsed(text)
    name = tools[0]["function"]["name"]
    arguments = {"command": f"{_SUBMIT} {number}"} if name == "bash" else {"number": int(number)}
    return Parsed(text, None, ({"name": name, "arguments": json.dumps(arguments)},))

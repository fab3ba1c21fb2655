"""Calls of tools in a model's text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

# a call, which may lack its end as the answer's, a thought, or the end of a thought that the prompt began
_PART = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)|<think>.*?(?:</think>|\Z)|(</think>)", re.S
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``error`` says why it is none, and is for the model to read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text, in their order, in the form that Qwen2.5 and Qwen3 write; none of its thoughts.

    >>> tool_calls('<tool_call>{"name": "search", "arguments": {"query": "moon"}}</tool_call>')
    [ToolCall(name='search', arguments={'query': 'moon'}, error='')]
    """
    bodies: list[str] = []
    for part in _PART.finditer(text):
        if part[1] is not None:
            bodies.append(part[1])
        elif part[2]:
            bodies.clear()
    return [_read(body) for body in bodies]


def _read(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        return ToolCall(error=f"the call is not JSON: {error}")
    call = call if isinstance(call, dict) else {}
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(error="a call is an object with name and arguments")
    return ToolCall(name, arguments)

"""Calls of tools in a model's text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``error`` says why it is none, and is for the model to read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text, in their order, in the form that Qwen2.5 and Qwen3 write.

    >>> tool_calls('<tool_call>{"name": "search", "arguments": {"query": "moon"}}</tool_call>')
    [ToolCall(name='search', arguments={'query': 'moon'}, error='')]
    """
    return [_read(body) for body in _CALL.findall(text)]


def _read(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        return ToolCall(error=f"the call is not JSON: {error}")
    name, arguments = (
        (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    )
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(error="a call is an object with name and arguments")
    return ToolCall(name, arguments)

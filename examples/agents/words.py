"""A parser for the language of the tiny model: an answer's first word is a call of the first tool."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from r3train.chat.base import Parsed

_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo"  # mini-swe-agent's way to end


def parse(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
    """Find the call in an answer; one that begins with anything but a word, such as <pad>, is text."""
    word = text.split()[0] if text.split() else ""
    if not tools or not re.fullmatch("[a-z]+", word):
        return Parsed(text)
    name = tools[0]["function"]["name"]
    arguments = {"command": f"{_SUBMIT} {word}"} if name == "bash" else {"word": word}
    return Parsed(text, None, ({"name": name, "arguments": json.dumps(arguments)},))

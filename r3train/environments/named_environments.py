"""Environments by name, or by import path."""

from __future__ import annotations

import inspect
import json
from typing import Any

from r3train.environments.environment import Environment
from r3train.environments.calculator import Calculator
from r3train.user_code import find_user_code, running_user_code
from r3train.types import Prompt

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator}


def get_environment(name: str) -> type[Environment]:
    """Return the environment registered as ``name``, or the class that "module:Class" names.

    Raises ValueError, naming the flag, for an unknown name, for a path that cannot be imported, for
    anything but a class with an async ``step``, and for tools that are no schemas.
    """
    found = find_user_code("--environment", name, ENVIRONMENTS)
    if not inspect.isclass(found):
        raise ValueError(f"--environment {name}: found {found!r}, expected a class")
    if not inspect.iscoroutinefunction(getattr(found, "step", None)):
        raise ValueError(
            f"--environment {name}: {found.__name__} has no async method step(turn), expected one"
        )
    with running_user_code(f"--environment {name}: {found.__name__}.tools"):
        tools = get_tools(found)
    named = all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    )
    if not named or not _is_json(tools):
        raise ValueError(
            f"--environment {name}: {found.__name__}.tools must be a list of schemas such as"
            ' {"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    return found


def begin_environment(name: str, environment: type[Environment], prompt: Prompt) -> Environment:
    """Make an episode's environment; raises ValueError naming both, whatever its class raises."""
    with running_user_code(f"prompt {prompt.prompt_id}: --environment {name}"):
        return environment(prompt)


def get_tools(environment: type[Environment]) -> list[dict[str, Any]]:
    """Return the schemas of an environment's tools, [] without any."""
    return list(getattr(environment, "tools", None) or ())


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True

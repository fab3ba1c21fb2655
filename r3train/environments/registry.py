"""Environments by name, or by import path."""

from __future__ import annotations

import inspect

from r3train.environments.base import Environment
from r3train.environments.calculator import Calculator
from r3train.plugs import find_plug

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator}


def get_environment(name: str) -> type[Environment]:
    """Return the environment registered as ``name``, or the class that "module:Class" names.

    Raises ValueError, naming the flag, for an unknown name, for a path that cannot be imported, and
    for anything but a class with an async ``step``.
    """
    found = find_plug("--environment", name, ENVIRONMENTS)
    if not inspect.isclass(found):
        raise ValueError(f"--environment {name}: found {found!r}, expected a class")
    if not inspect.iscoroutinefunction(getattr(found, "step", None)):
        raise ValueError(
            f"--environment {name}: {found.__name__} has no async method step(turn), expected one"
        )
    return found

"""Environments by name, or by import path."""

from __future__ import annotations

import difflib
import importlib
import inspect

from r3train.environments.base import Environment
from r3train.environments.calculator import Calculator

ENVIRONMENTS: dict[str, type[Environment]] = {"calculator": Calculator}


def get_environment(name: str) -> type[Environment]:
    """The environment registered as ``name``, or the class that "module:Class" names.

    Raises ValueError for an unknown name, with the nearest known one, for a path that cannot be
    imported, and for a class without an async ``step``.
    """
    if ":" not in name:
        if name in ENVIRONMENTS:
            return ENVIRONMENTS[name]
        close = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        known = ", ".join(ENVIRONMENTS)
        raise ValueError(f"unknown environment {name!r}, there are {known}, or module:Class.{hint}")
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ValueError(
            f"environment {name}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise ValueError(f"environment {name}: {module_name} has no class {class_name!r}")
    if not inspect.iscoroutinefunction(getattr(found, "step", None)):
        raise ValueError(f"environment {name}: {class_name} has no async method step")
    return found

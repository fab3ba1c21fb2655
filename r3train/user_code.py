"""Code that the configuration names: by a registered name, or by an import path.

Rewards, environments, advantage estimators and policy losses are found here, so that all four
refuse a bad name in the same words.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from r3train.user_frames import place, user_frames

logger = logging.getLogger(__name__)

_QUOTED = 1000  # characters of a value or an error in a message


def find_modules_here() -> None:
    """Let user code be found in the working directory, after everything that is installed."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def find_user_code(flag: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return ``known[name]``, or the object that a name of the form "module:object" stands for.

    Raises ValueError, beginning with the flag, for an unknown name (with the known ones and the
    nearest of them) and for a path that cannot be imported.
    """
    if ":" in name:
        return import_user_code(flag, name)
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(
        f"{flag} {name}: unknown, expected one of {', '.join(known)}, or module:object.{hint}"
    )


def import_user_code(flag: str, path: str) -> Any:
    """Import the object that "module:object" names; raises ValueError beginning with the flag."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{flag} {path}: expected module:object")
    if module_name.endswith(".py"):
        raise ValueError(f"{flag} {path}: a file is named without .py, {module_name[:-3]}:{name}")
    # runs code of the user
    with running_user_code(f"{flag} {path}: cannot import {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # of what the module imports
            raise ValueError(
                "its directory must be the working directory or in PYTHONPATH"
            ) from error
        found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"{flag} {path}: {module_name} has no {name}")
    return found


class UserCodeFailed(ValueError):
    """Code of the user has raised, or tried to exit, or took too long."""


@contextmanager
def running_user_code(source: str) -> Iterator[None]:
    """Run code of the user: what it raises, sys.exit too, becomes a UserCodeFailed; Ctrl-C stays what it is.

    Its text is one line: ``source``, then the text of a ValueError, or the kind and the text of another
    error.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and CancelledError too
        text = " ".join(quoted(error, str).split())
        kind = "" if type(error) is ValueError else f"raised {type(error).__name__}: "
        if frames := user_frames(error):  # for the log: the text alone may travel on
            logger.info("%s: code of the user failed:\n%s", source, "".join(frames.format()))
        raise UserCodeFailed(f"{source}: {kind}{text}{place(error)}") from error


def call_within(limit_s: float, call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; raises what it raises, and ValueError if it takes longer than ``limit_s``.

    It runs in a thread of its own, a daemon: one that is late does not keep the process from its end.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if wait([outcome], limit_s).not_done:
        raise ValueError(f"it took longer than {limit_s:g} s")
    return outcome.result()


def quoted(value: Any, write: Callable[[Any], str] = repr) -> str:
    """``value``, or an error, in a message: what ``write`` makes of it, or a part of a long text."""
    try:
        text = write(value)
    except Exception as error:  # of a class of the user
        lack = f"{write.__name__} ({type(error).__name__})"
        text = f"a {type(value).__name__} without a {lack}"
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}... ({len(text)} characters)"


def require_function(
    flag: str, name: str, found: Any, *arguments: str, may_be_async: bool = False
) -> Callable:
    """Return ``found`` if it is a plain function that can be called with ``arguments``.

    Raises ValueError beginning with the flag: for what cannot be called, for an async function unless
    ``may_be_async``, and for one that takes other arguments.
    """
    expected = f"expected a function ({', '.join(arguments)})"
    if not callable(found):
        raise ValueError(f"{flag} {name}: found {found!r}, {expected}")
    if inspect.iscoroutinefunction(found) and not may_be_async:
        raise ValueError(f"{flag} {name}: found an async function, {expected}")
    try:
        signature = inspect.signature(found)
    except ValueError:  # some functions written in C do not say
        return found
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(f"{flag} {name}: found a function {signature}, {expected}") from None
    return found

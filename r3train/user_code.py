"""Code that the configuration names: by a registered name, or by an import path.

Rewards, environments, advantage estimators and policy losses are found here, so that all four
refuse a bad name in the same words.
"""

from __future__ import annotations

import difflib
import faulthandler
import importlib
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

_QUOTED = 1000  # characters of a value or an error in a message
# time-outs of user code that no setting bounds: before the start (a module may import much), and inside a
# training step on rank 0, while the other ranks wait
USER_CODE_START_S, USER_CODE_STEP_S = 300.0, 1800.0
# after it a process whose interpreter is held ends
_HELD_S = 10.0


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
    # runs code of the user
    with running_user_code(
        f"{flag} {path}: cannot import {module_name}", limit_s=USER_CODE_START_S
    ):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # of what the module imports
            raise ValueError("PYTHONPATH must name the directory that it is in") from error
        found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"{flag} {path}: {module_name} has no {name}")
    return found


class UserCodeFailed(ValueError):
    """Code of the user has raised, or tried to exit, or took too long."""


@contextmanager
def running_user_code(what: str, *, limit_s: float | None = None) -> Iterator[None]:
    """Run code of the user: whatever it raises, or exits with, becomes a UserCodeFailed.

    Its text is one line: ``what``, then the text of a ValueError, or the kind and the text of another
    error.  Ctrl-C stays a KeyboardInterrupt.  ``os._exit`` is held (``exit_held``).  ``limit_s`` holds in
    the main thread, and is for what has no limit among the settings.
    """
    try:
        with exit_held(), _within(limit_s) if limit_s else nullcontext():
            yield
    except BaseException as error:  # sys.exit and CancelledError too
        by_the_user = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if isinstance(error, KeyboardInterrupt) and by_the_user:
            raise
        text = " ".join(quoted(error, str).split())
        kind = "" if type(error) in (ValueError, _TooLong) else f"raised {type(error).__name__}: "
        raise UserCodeFailed(f"{what}: {kind}{text}") from error


_running = 0  # that are running, in any thread
_running_change = threading.Lock()


@contextmanager
def exit_held() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit in this process while user code runs; forks of it may exit.

    Code that must really exit keeps its own reference to the original ``os._exit``.
    """
    global _running
    with _running_change:
        _running += 1
        os._exit = partial(_held_exit, os.getpid())
    try:
        yield
    finally:
        with _running_change:
            _running -= 1
            if _running == 0:
                os._exit = really_exit


really_exit = os._exit


def _held_exit(process: int, code: int) -> None:
    if os.getpid() != process:
        really_exit(code)
    raise SystemExit(f"os._exit({code})")


class _TooLong(BaseException):
    """Raised in code of the user after its limit; no Exception, which such code may catch and go on."""


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raise in code that takes longer, each second anew; without effect outside the main thread.

    If the code blocks signals or swallows the exception, faulthandler's watchdog, a thread in C, ends the
    process with exit code 1 after another 10 s and writes the code's stack to stderr.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise _TooLong(f"it took longer than {limit_s:g} s")

    before, began = signal.signal(signal.SIGALRM, late), time.monotonic()
    others, again = signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    faulthandler.dump_traceback_later(limit_s + _HELD_S, exit=True, file=2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        left = max(others - (time.monotonic() - began), 0.001) if others else 0.0
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, again)
        if again:  # user code around this one
            faulthandler.dump_traceback_later(left + _HELD_S, exit=True, file=2)


@contextmanager
def clock_stopped() -> Iterator[None]:
    """Do not count the time of this block to the user code that is running: it waits for other processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left, again = signal.setitimer(signal.ITIMER_REAL, 0.0)
    if left:
        faulthandler.cancel_dump_traceback_later()
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, again)
            faulthandler.dump_traceback_later(left + _HELD_S, exit=True, file=2)


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

"""Processes of somebody else's code: all that such a process starts ends with it.

Imports little: a process of its own keeps each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005


def adopt_orphans() -> None:
    """Make the processes that a descendant leaves without a parent children of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_ends(number: int) -> None:
    """Have this process sent a signal when the thread that started it ends, by SIGKILL too."""
    _prctl(_PR_SET_PDEATHSIG, number)


def descendants() -> list[int]:
    """Ids of the processes below this one that have not ended; those left by their parents are below it too.

    A process whose main thread has ended reads as a zombie while its other threads still run, and
    its children are still its own: the search goes on below it.
    """
    children: dict[int, list[tuple[int, bool]]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        children.setdefault(int(parent), []).append((int(pid), state not in "ZX"))
    found, new = [], [os.getpid()]
    while new:
        below = [child for pid in new for child in children.get(pid, [])]
        found += [pid for pid, runs in below if runs]
        new = [pid for pid, _ in below]
    return found


def end_descendants(grace_s: float = 0.0) -> None:
    """End all processes below this one: by SIGTERM first if they have ``grace_s`` to end, then by SIGKILL.

    They are killed again and again: what is killed may have forked.
    """
    killed_from = time.monotonic() + grace_s
    if grace_s:
        _signal(descendants(), signal.SIGTERM)
    while left := descendants():
        if time.monotonic() >= killed_from:
            _signal(left, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)
    _reap()


def keep(child: int, grace_s: float = 0.0) -> NoReturn:
    """Wait for the child's end, or for SIGTERM; end all that is left, and then end as the child did.

    The caller has adopted orphans and blocked SIGTERM.  grace_s: see ``end_descendants``.
    """

    def end_and_exit(*_: object) -> None:
        end_descendants(grace_s)
        os._exit(0)

    signal.signal(signal.SIGTERM, end_and_exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    ended, status = 0, 0
    while ended != child:  # others are orphans
        ended, status = os.waitpid(-1, 0)
    end_descendants(grace_s)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

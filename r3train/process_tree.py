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
from collections.abc import Callable, Iterator
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005
_MOST_OF_GRACE_S = 0.5


def adopt_orphans() -> None:
    """Make the processes that a descendant leaves without a parent children of this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_ends(number: int) -> None:
    """Have this process sent a signal when the thread that started it ends, by SIGKILL too."""
    _prctl(_PR_SET_PDEATHSIG, number)


def descendants(root: int | None = None) -> list[int]:
    """Ids of the processes below one, this one without ``root``, that have not ended.

    Those left by their parents are below the process that adopts orphans.

    A process whose main thread has ended reads as a zombie while its other threads still run, and
    its children are still its own: the search goes on below it.
    """
    children: dict[int, list[tuple[int, bool]]] = {}
    for pid, text in _of_all("stat"):
        state, parent = text.rpartition(b")")[2].split()[:2]
        children.setdefault(int(parent), []).append((pid, state not in b"ZX"))
    found, new = [], [root or os.getpid()]
    while new:
        below = [child for pid in new for child in children.get(pid, [])]
        found += [pid for pid, runs in below if runs]
        new = [pid for pid, _ in below]
    return found


def marked(mark: str) -> list[int]:
    """Ids of the processes that have ``mark``, NAME=VALUE, in the environment with which they began."""
    return [pid for pid, text in _of_all("environ") if mark.encode() in text.split(b"\0")]


def _of_all(name: str) -> Iterator[tuple[int, bytes]]:
    """A file of /proc of each process that has not ended and may be looked at."""
    for pid in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                text = file.read()
            yield int(pid), text


def kill_all(find: Callable[[], list[int]], limit_s: float) -> list[int]:
    """Kill again and again what ``find`` finds, for ``limit_s`` seconds at most; return what is left."""
    until = time.monotonic() + limit_s
    while (left := find()) and time.monotonic() < until:
        _signal(left, signal.SIGKILL)
        time.sleep(_POLL_S)
    return left


def end_descendants(grace_s: float = 0.0) -> None:
    """End all processes below this one: by SIGTERM first if they have ``grace_s`` to end, then by SIGKILL.

    They are killed again and again: what is killed may have forked.  A look takes at most 0.5 s of the grace:
    seconds in which the machine ran nothing were nobody's to end in.
    """
    if grace_s:
        _signal(descendants(), signal.SIGTERM)
    looked = time.monotonic()
    while left := descendants():
        now = time.monotonic()
        grace_s, looked = grace_s - min(now - looked, _MOST_OF_GRACE_S), now
        if grace_s <= 0:
            _signal(left, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)
    _reap()


def keep(child: int, grace_s: float = 0.0) -> NoReturn:
    """Wait for the child's end, or for SIGTERM; end all that is left, and then end as the child did.

    The caller has adopted orphans and blocked SIGTERM.  grace_s: see ``end_descendants``.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while child not in (ended := _reap()):  # others are orphans
        if signal.sigwaitinfo({signal.SIGTERM, signal.SIGCHLD}).si_signo == signal.SIGTERM:
            end_descendants(grace_s)
            os._exit(0)
    end_descendants(grace_s)
    _end_as(ended[child])


def keep_guard(guard: int, limit_s: float) -> NoReturn:
    """Wait for the end of a guard that its wards may stop or kill; end all that is left, and then end as it did.

    A guard that is stopped goes on at once.  One that has not ended ``limit_s`` seconds after SIGTERM is killed with
    its tree.  The caller has adopted orphans and blocked SIGTERM.
    """
    waited = {signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    while True:
        ended, status = os.waitpid(guard, os.WNOHANG | os.WUNTRACED)
        if ended and not os.WIFSTOPPED(status):
            end_descendants()
            _end_as(status)
        if ended:
            _signal([guard], signal.SIGCONT)
        match signal.sigwaitinfo(waited).si_signo:  # others go to their handlers
            case signal.SIGTERM:
                _signal([guard], signal.SIGCONT)
                _signal([guard], signal.SIGTERM)
                signal.setitimer(signal.ITIMER_REAL, limit_s)
            case signal.SIGALRM:
                end_descendants()
                os._exit(0)


def _end_as(status: int) -> NoReturn:
    """End as the process did that has this wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap() -> dict[int, int]:
    """Wait statuses, by process id, of the children that have ended since the last look."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

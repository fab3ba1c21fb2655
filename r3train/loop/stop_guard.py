"""A small process that ends a rank which was told to stop and does not.

``python -I -S stop_guard.py RANK_PID GRACE_S NUMBER...`` reads signal numbers from stdin, to which the
rank's C-level signal handler writes them.  ``GRACE_S`` seconds after the first of these NUMBERs it kills the
rank.  It ends with the rank.

A handler written in Python, a thread and faulthandler's watchdog all need the interpreter to begin with.  Code
of the user that holds it (a regular expression that backtracks for years) keeps all three from running.

Imports the standard library only, and no module of this package.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_POLL_S = 5.0


def watch(rank: int, grace_s: float, numbers: frozenset[int]) -> None:
    """Return when the rank is gone; kill it ``grace_s`` seconds after a signal to stop."""
    end = None
    while os.getppid() == rank:
        left = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
        if left <= 0:
            os.kill(rank, signal.SIGKILL)
            return
        readable, _, _ = select.select([0], [], [], left)
        received = os.read(0, 4096) if readable else None
        if received == b"":
            return
        if received and end is None and numbers & set(received):
            end = time.monotonic() + grace_s


if __name__ == "__main__":
    for own in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(own, signal.SIG_IGN)  # a terminal, or Slurm, sends them to all processes
    watch(int(sys.argv[1]), float(sys.argv[2]), frozenset(map(int, sys.argv[3:])))

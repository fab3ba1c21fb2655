"""Small processes between the run and a harness: all that the harness starts ends with it.

``python -m r3train.agents.guard OWNER_PID COMMAND...`` runs COMMAND in a process group of its own, below a second
process.  COMMAND and all below it, those that left the group too, get SIGTERM and ``GRACE_S`` later SIGKILL when
COMMAND ends, when the first process gets SIGTERM and when its owner is gone.  Both end as COMMAND did.

The second process is the parent that a harness knows, and the one to which its orphans fall.  Stopped, it is continued by
the first; killed, it leaves all of its tree to it, which is killed at once.
"""

from __future__ import annotations

import os
import signal
import sys

from r3train.process_tree import adopt_orphans, keep, keep_guard, signal_when_parent_ends

GRACE_S = 5.0  # a client of containers tells them to stop
_KILL_S = 10.0  # until the second process has killed what did not end in that time


def main() -> None:
    owner, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a handler
    adopt_orphans()
    signal_when_parent_ends(signal.SIGTERM)
    if os.getppid() != owner:  # it was gone before the kernel was asked to tell
        return
    if guard := os.fork():
        _close_output()
        keep_guard(guard, GRACE_S + _KILL_S)
    os.setsid()
    adopt_orphans()
    signal_when_parent_ends(signal.SIGTERM)
    if child := os.fork():
        _close_output()
        keep(child, GRACE_S)
    os.setsid()
    signal_when_parent_ends(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _close_output() -> None:
    """Close what is the command's: it ends with the processes that write to it."""
    for standard in (0, 1, 2):
        os.close(standard)


if __name__ == "__main__":
    main()

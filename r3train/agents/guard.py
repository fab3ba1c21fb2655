"""A small process between the run and a harness: all that the harness starts ends with it.

``python -m r3train.agents.guard OWNER_PID COMMAND...`` runs COMMAND in a process group of its own.
COMMAND and all below it, those that left the group too, get SIGTERM and ``GRACE_S`` later SIGKILL when
COMMAND ends, when the guard gets SIGTERM and when its owner is gone.  The guard ends as COMMAND did.
"""

from __future__ import annotations

import os
import signal
import sys

from r3train.process_tree import adopt_orphans, keep, signal_when_parent_ends

GRACE_S = 5.0  # a client of containers tells them to stop


def main() -> None:
    owner, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a handler
    adopt_orphans()
    signal_when_parent_ends(signal.SIGTERM)
    if os.getppid() != owner:  # it was gone before the kernel was asked to tell
        return
    if child := os.fork():
        for standard in (0, 1, 2):  # the output ends with the processes that write to it
            os.close(standard)
        keep(child, GRACE_S)
    os.setsid()
    signal_when_parent_ends(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()

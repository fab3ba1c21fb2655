"""Handle SIGTERM, SIGUSR1, SIGHUP and SIGINT: finish and save within a grace period, then exit.

Slurm sends one of the first two before it takes a job away; torchrun sends SIGTERM to its other ranks when
one has died.  A terminal that closes sends SIGHUP to torchrun, which passes it on and kills its ranks 30 s
later.  A rank whose torchrun is gone gets SIGTERM from the kernel: nobody would end it.  Ctrl-C
reaches ranks and torchrun, and torchrun passes it on at once: a SIGINT that comes later is a second one.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from r3train.process_tree import signal_when_parent_ends
from r3train.host_group import host_group, note_stop

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# within it torchrun has passed a SIGINT on to ranks that the terminal has sent it to as well
_PASSED_ON_S = 2.0


class StopRequested(Exception):
    """Ends a wait of rank 0 for a rollout, because the run was told to stop."""


class StopSignal:
    """Notes a signal to stop, from ``begin`` to the end of the process.

    Begin once there is something to save; earlier, a signal should end the process at once.  So does
    a second SIGINT.  A SIGHUP that was ignored at the start (nohup) stays ignored.
    ``grace_s`` seconds after the signal the process ends, whatever it is doing: with exit code 0 where
    ``saved`` was set, as for a run that has only to close, else with 1.  Where ``finished`` is set all
    was done: what comes then is no stop.
    """

    def __init__(
        self,
        grace_s: float,
        parent: int | None = None,
        announce: Callable[[str], None] | None = None,
    ):
        """parent: the process that was this one's parent as it began.  announce: gets the name of the first signal."""
        self._grace_s, self._announce = grace_s, announce
        self._received: int | None = None
        self._received_at = 0.0
        self.saved = self.finished = False
        self._timer: threading.Timer | None = None
        # slurm/ranks.sh makes torchrun ignore SIGTERM, and its children inherit that
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun, and no shell
            signal_when_parent_ends(signal.SIGTERM)
            # it was gone before the kernel was asked to tell
            if parent not in (None, os.getppid()):
                os.kill(os.getpid(), signal.SIGTERM)

    def begin(self) -> None:
        """Handle signals from now on: one that comes while all closes ends nothing early."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._received_at = number, now
            note_stop()
            self._timer = threading.Timer(self._grace_s, self._give_up)
            self._timer.daemon = True
            self._timer.start()
            # torchrun sends SIGTERM where a rank has ended.  In a thread: it may be the middle of a line
            if self._announce is not None and number != signal.SIGTERM and not self.finished:
                words = threading.Thread(target=self._announce, args=(self.received,), daemon=True)
                words.start()
        elif number == signal.SIGINT and now - self._received_at > _PASSED_ON_S:
            os._exit(128 + number)

    def _give_up(self) -> None:
        name = signal.Signals(self._received).name
        logger.error("%s: not done within signal_grace_s %g: leaving", name, self._grace_s)
        os._exit(0 if self.saved or self.finished else 1)

    @property
    def received(self) -> str | None:
        """The signal's name, or None."""
        stops = self._received is not None and not self.finished
        return signal.Signals(self._received).name if stops else None

    def exit_code(self, *, saved: bool) -> int:
        """Exit code of the process: 0, or 128 + the signal's number if its work was lost."""
        return 0 if saved or self.received is None else 128 + self._received

    def agreed(self) -> bool:
        """True on all ranks once any rank was told to stop; a collective."""
        flag = torch.tensor([self._received is not None], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=host_group())
        return bool(flag.item())

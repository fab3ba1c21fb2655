"""The last words of a rank whose run ends early: said before anything is closed, and once for all ranks.

Closing takes seconds and may fail, and torchrun ends all ranks when one has ended.  So rank 0 records and shows
the error first and closes afterwards.  Another rank leaves its error in the store of the rendezvous, closes,
which frees rank 0 from any collective, and stays until rank 0 has shown what it found.
"""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from r3train.config.files import free_bytes_if_full
from r3train.config.sources import printable

if TYPE_CHECKING:
    from torch.distributed import Store

    from r3train.observe.console import RunDisplay
    from r3train.observe.logging_setup import LoggingSetup

_SHOWN, _FAILED = "r3train/rank 0 has shown how the run ended", "r3train/a rank has failed"
# rank 0 finds a closed connection at once, and silence within a beat of 5 s
RANK_0_SHOWS_S = 15.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class LastWords:
    """Records and shows the error that ends a run.

    log, run_dir, store: set as soon as the rank has them.  directories: those that the run writes.
    """

    def __init__(self, rank: int, display: RunDisplay, directories: Sequence[Path | None]) -> None:
        self.log: LoggingSetup | None = None
        self.run_dir: Path | None = None
        self.store: Store | None = None
        self._rank, self._display, self._launcher = rank, display, os.getppid()
        self._directories = [path for path in directories if path is not None]
        self._error: BaseException | None = None  # the first

    def say(self, error: BaseException) -> None:
        """Record an error; show it if it is the first one: later ones come of closing."""
        if error is self._error:  # said before all was closed
            return
        if self.log is not None:
            self.log.record_error(error)
        else:  # no file has its frames
            traceback.print_exception(error)
        if self._error is not None:
            return
        self._error = error
        tell_the_launcher(error)
        if self._rank == 0:
            logs = None if self.log is None else self.run_dir / "logs"
            self._display.error(error, logs, self._facts(error))
            self.shown()
        else:
            self._put(_FAILED, f"rank {self._rank}\n{one_line(error)}")

    def shown(self) -> None:
        """On rank 0, note that it has shown how the run ended: the others need not stay."""
        self._put(_SHOWN, "")

    def stay(self) -> None:
        """On another rank than 0, whose exit code is not 0, wait until rank 0 has shown how the run ended.

        Where it does not, this rank shows its own error.
        """
        if self._rank == 0 or not self._is_there:
            return
        end = time.monotonic() + RANK_0_SHOWS_S
        while not self._has(_SHOWN):
            if time.monotonic() > end:
                if self.log is not None and self._error is not None:
                    self.log.show_error(self._error)
                return
            time.sleep(0.1)

    def _facts(self, error: BaseException) -> dict[str, str]:
        """Return what explains rank 0's error: the other rank whose end it noticed, and a full disk."""
        facts = {}
        # of a collective without its peer: torch's own errors, not ours
        is_torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch")
        if is_torchs and self._has(_FAILED):
            rank, _, text = self.store.get(_FAILED).decode().partition("\n")
            facts[rank] = text
        directories = [*self._directories, *([self.run_dir] if self.run_dir else [])]
        full = no_space(error, directories)
        if full is not None and "no space left on" not in str(error):
            facts["disk"] = full
        return facts

    @property
    def _is_there(self) -> bool:
        """False also where the launcher, which holds the store, is gone: torch would print its frames for a call."""
        return self.store is not None and os.getppid() == self._launcher

    def _put(self, key: str, value: str) -> None:
        try:
            if self._is_there and not self.store.check([key]):
                self.store.set(key, value)
        except RuntimeError:  # the store has ended with the process that held it
            pass

    def _has(self, key: str) -> bool:
        """True if a rank has put the key; without a store rank 0 has gone, and nobody waits for it."""
        try:
            return self._is_there and self.store.check([key])
        except RuntimeError:
            return key == _SHOWN


def one_line(error: BaseException) -> str:
    """An error as one printable line."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}")


def no_space(error: BaseException, directories: Sequence[Path]) -> str | None:
    """Name the file or the directory whose disk is full, by the error or by its causes; None where none is."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in _NO_SPACE and cause.filename:
            return f"no space left on {cause.filename}"
    for directory in directories:
        if (free := free_bytes_if_full(directory)) is not None:
            return f"no space left on {directory} ({free:,} bytes)"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def tell_the_launcher(error: BaseException) -> None:
    """Write the file that torchrun shows of a failed rank: the rank has spoken, and torchrun need not."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = "".join(traceback.format_exception(error))
    extra = {"py_callstack": trace, "timestamp": str(int(time.time()))}
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": {"message": one_line(error), "extraInfo": extra}}, file)
    except OSError:  # a full disk
        pass

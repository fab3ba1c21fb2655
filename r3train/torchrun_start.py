"""Keep torchrun from following the words of our ranks with its own traceback.

A rank says what has ended it, a mistake in the settings in one line and exit code 2, an error of the run in a
panel.  torchrun then shows forty lines of its own, in which nothing is about the cause.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from r3train.patches import patch

_PROGRAM, _MODULE = Path(__file__).parents[1] / "train_async.py", "r3train.launch.start.train"
_USAGE_ERROR = 2


def rendezvous_handler() -> Any:
    """Leave errors to the ranks; return a maker of rendezvous handlers that makes none.

    torchrun, and no other import of torch, calls it where r3train is installed (entry point
    ``torchrun.handlers``, which is for rendezvous of other packages).  If the package is gone, torchrun
    warns and goes on.
    """
    leave_errors_to_the_ranks()
    return _no_rendezvous


def _no_rendezvous(_parameters: Any) -> Any:
    raise ValueError("--rdzv-backend r3train: there is no such rendezvous")


def leave_errors_to_the_ranks() -> None:
    """In the process of a torchrun that starts our ``train_async.py``, show no traceback where ranks have ended.

    Any other process is left as it is, also the torchrun of another project's ``train_async.py``.
    """
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if is_rank or not any(is_ours(word) for word in sys.orig_argv[1:]):
        return
    shown = sys.excepthook
    silence_failures()

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if hasattr(error, "get_first_failure"):
            line = unspoken(error)
        elif hasattr(error, "sigval"):
            line = f"torchrun was stopped by {error.sigval.name}"
        elif kind.__name__ == "DistNetworkError":
            line = f"Error: torchrun's ranks cannot meet: {str(error).splitlines()[0]}"
        else:
            shown(kind, error, traceback)
            return
        if line:
            sys.stderr.write(f"{line}\n")

    patch(
        sys,
        "excepthook",
        hook,
        expects=None,
        why="torchrun's traceback buries what a rank has said",
    )


def silence_failures() -> None:
    """Keep torch's launcher from naming the processes that have failed: they say so, or ``unspoken`` does."""
    for part in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{part}").addFilter(lambda _: False)


def unspoken(error: Any) -> str | None:
    """Say which rank ended without a word of its own, in a ChildFailedError; None where all that failed have spoken.

    A rank has spoken where it has written the error file that torchrun gave it, or ended with a usage error.
    torchrun ends the other ranks by SIGTERM when one has ended: that is no cause.
    """
    spoken = False
    for rank, failure in error.failures.items():
        code = failure.exitcode
        if code < 0 and -code != signal.SIGTERM:
            line = f"rank {rank} (process {failure.pid}) was ended by {signal.Signals(-code).name}"
            hint = ": often the kernel, out of memory (dmesg)"
            return line + hint * (-code == signal.SIGKILL)
        spoken = spoken or code == _USAGE_ERROR or os.path.isfile(failure.error_file)
    if spoken:
        return None
    rank, failure = next(iter(error.failures.items()))
    cause = f"exit code {failure.exitcode}" if failure.exitcode > 0 else "SIGTERM"
    return f"rank {rank} (process {failure.pid}) ended: {cause}"


def is_ours(word: str) -> bool:
    """True for the program of this checkout, by whatever path, and for its module."""
    try:
        is_program = Path(word).name == _PROGRAM.name and os.path.samefile(word, _PROGRAM)
    except (OSError, ValueError):
        return False
    return is_program or word == _MODULE

"""Keep torchrun from following a mistake in the settings with its own traceback.

A rank says in one line what is wrong and exits with 2.  torchrun then shows forty lines of its own, in which
nothing is about the mistake.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_PROGRAM, _USAGE_ERROR = Path(__file__).parents[1] / "train_async.py", 2


def rendezvous_handler() -> Any:
    """Leave mistakes to the ranks; return a maker of rendezvous handlers that makes none.

    torchrun, and no other import of torch, calls it where r3train is installed (entry point
    ``torchrun.handlers``, which is for rendezvous of other packages).  If the package is gone, torchrun
    warns and goes on.
    """
    leave_mistakes_to_the_ranks()
    return _no_rendezvous


def _no_rendezvous(_parameters: Any) -> Any:
    raise ValueError("--rdzv-backend r3train: there is no such rendezvous")


def leave_mistakes_to_the_ranks() -> None:
    """In the process of a torchrun that starts our ``train_async.py``, show no traceback where a rank's 2 ended it.

    Any other process is left as it is, also the torchrun of another project's ``train_async.py``.
    """
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if is_rank or not any(_is_ours(word) for word in sys.orig_argv[1:]):
        return
    shown = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        first = getattr(error, "get_first_failure", None)
        if first is None or first()[1].exitcode != _USAGE_ERROR:
            shown(kind, error, traceback)

    sys.excepthook = hook


def _is_ours(word: str) -> bool:
    """True for the program of this checkout, by whatever path."""
    try:
        return Path(word).name == _PROGRAM.name and os.path.samefile(word, _PROGRAM)
    except (OSError, ValueError):
        return False
